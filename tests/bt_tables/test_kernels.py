"""Promises of the compiled kernels, without a GPU: no spill, no recompilation, 64-bit places."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.compiled import ARCHITECTURES, Resources, compile_resources, run_compiled
from tests.support.executors import InterpretedExecutor
from tests.support.table_kernels import TABLE_KERNELS
from tests.support.tables import batch_of, columns, plan_groups

from bt_tables import StagedBlockTables
from bt_width import AttentionSpec, ServingLimits


@pytest.fixture(scope="module")
def resources() -> dict[str, list[Resources]]:
    """What each kernel uses, on every architecture."""
    return compile_resources(TABLE_KERNELS)


@pytest.mark.parametrize("kernel", [use.name for use in TABLE_KERNELS])
def test_a_kernel_compiles_without_spills_or_local_memory(
    resources: dict[str, list[Resources]], kernel: str
) -> None:
    found = resources[kernel]

    assert [usage.architecture for usage in found] == list(ARCHITECTURES)
    for usage in found:
        assert (usage.spills, usage.local, usage.stack) == (0, 0, 0)
        assert usage.registers <= 64


def test_nothing_is_compiled_after_the_warmup() -> None:
    report = json.loads(run_compiled("tests.support.count_table_kernels"))

    # one of the step; one of compressed rows for ids and one for slots
    assert report["warmup"] == {"step": 1, "csr": 2}
    assert report["all"] == report["warmup"]
    assert report["launches"]["step"] >= 100
    assert report["launches"]["csr"] >= 50


def test_a_table_may_start_past_2_to_31_elements(tmp_path: Path) -> None:
    """Offsets are 64-bit: the same step, with its tables far up in a sparse file.

    Reported as https://github.com/syv-ai/qwen38-27b-rtx3090/issues/86
    """
    limits = ServingLimits(max_model_len=64, max_num_reqs=2, max_num_batched_tokens=4)
    tables = StagedBlockTables(
        plan_groups(limits, AttentionSpec(block_size=8)), device=InterpretedExecutor()
    )
    far = 2**31 + 64
    storage = tables._storage
    size = far + storage.rows.numel()
    storage.rows = torch.from_file(str(tmp_path / "rows"), True, size, dtype=torch.int32)
    storage.groups = tuple(group._replace(table_at=far) for group in storage.groups)
    storage.batch = torch.from_file(str(tmp_path / "batch"), True, size, dtype=torch.int32)
    storage.write_groups()
    tables._rows._launch_step = InterpretedExecutor().step_launch(storage)

    tables.append_block_ids(1, [[5, 6]])
    tables.step(batch_of([1], [[9]]))
    tables.append_block_ids(1, [[7]])
    slots = tables.step(batch_of([1], [[9, 16]])).slot_mappings

    assert columns(storage.table(storage.rows, 0), 1, 3) == [5, 6, 7]
    assert columns(storage.table(storage.batch, 0), 0, 3) == [5, 6, 7]
    assert slots.tolist() == [[49, 56]]


def test_an_interpreted_step_of_serving_size_equals_the_reference() -> None:
    limits = ServingLimits(max_model_len=4096, max_num_reqs=64, max_num_batched_tokens=1024)
    spec = AttentionSpec(block_size=32)
    layouts = plan_groups(limits, spec, (spec, 8))
    rng = np.random.default_rng(5)
    counts = rng.integers(0, 60, (64, 2)).astype(np.int32)
    ids = rng.integers(0, 2**20, counts.sum()).astype(np.int32)
    batch = batch_of(rng.permutation(64).tolist(), [rng.integers(0, 4096, 16).tolist()] * 64)

    found = []
    for executor in (InterpretedExecutor(), "cpu"):
        tables = StagedBlockTables(layouts, device=executor)
        tables.stage(np.arange(64, dtype=np.int32), counts, ids)
        found.append(tables.step(batch))

    kernel, reference = found
    assert all(map(torch.equal, kernel.block_tables, reference.block_tables))
    assert torch.equal(kernel.slot_mappings, reference.slot_mappings)
