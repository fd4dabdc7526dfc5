"""Compilations of the table kernels over many steps, in a process of compiled kernels."""

from __future__ import annotations

import json
import random

import numpy as np
import torch
from tests.support.poison import misaligned
from tests.support.random_tables import random_batch, random_ids
from tests.support.stub_gpu import Recorder, install
from tests.support.table_model import TableModel
from tests.support.tables import plan_groups

from bt_tables import StagedBlockTables
from bt_tables._storage import Storage
from bt_tables.devices import CpuExecutor, CsrLaunch, StepLaunch
from bt_tables.kernels import fused_step, gather_csr
from bt_width import AttentionSpec, MambaSpec, ServingLimits

STEPS = 60


class CompilingExecutor(CpuExecutor):
    """Compiles what would be launched, and runs nothing."""

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return a launch that compiles, also for views that start anywhere."""
        inner = fused_step.step_launcher(storage)

        def launch(
            packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
        ) -> None:
            inner(packet, starts, positions, programs)
            inner(packet, misaligned(starts), misaligned(positions), programs + 1)

        return launch

    def csr_launch(self) -> CsrLaunch:
        """Return the kernel's launcher."""
        return gather_csr.gather_csr


def main() -> None:
    """Print how many compilations the warm-up needed, and how many all steps after it."""
    install()
    step_kernel = Recorder(fused_step.fused_step_kernel)
    csr_kernel = Recorder(gather_csr.gather_csr_kernel)
    fused_step.fused_step_kernel = step_kernel
    gather_csr.gather_csr_kernel = csr_kernel
    limits = ServingLimits(max_model_len=900, max_num_reqs=17, max_num_batched_tokens=300)
    spec = AttentionSpec(block_size=12)
    layouts = plan_groups(limits, spec, (spec, 4), MambaSpec(block_size=16))
    tables = StagedBlockTables(layouts, device=CompilingExecutor())
    tables.warmup()
    report = {"warmup": {"step": step_kernel.compilations, "csr": csr_kernel.compilations}}

    draw = random.Random(7)
    model = TableModel(layouts)
    for _ in range(STEPS):
        for _ in range(draw.randint(0, 4)):
            row = draw.randrange(17)
            ids = random_ids(draw, model, row, replace=True)
            tables.append_block_ids(row, ids, overwrite=True)
        rows = draw.sample(range(17), draw.randint(0, 17))
        tables.step(random_batch(draw, model, rows).as_step())
        group = draw.randrange(2)
        held = [12 * tables.num_blocks(row, group) for row in rows]
        lengths = np.array([draw.randint(0, most) for most in held], np.int32)
        tables.gather_csr(group, lengths, len(rows))
        tables.gather_token_csr(group, lengths, len(rows))
    report["all"] = {"step": step_kernel.compilations, "csr": csr_kernel.compilations}
    report["launches"] = {"step": step_kernel.launches, "csr": csr_kernel.launches}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
