"""What a step of ``StagedBlockTables`` costs on a GPU: kernels by events, and the host.

Beside one fused launch stand the three separate calls, a launch each. First tables and
slots are compared with the CPU's, and no time is printed on a difference.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from benchmarks.table_workloads import REQUESTS, WORKLOADS, decode_batch, layouts, start

from bt_tables import StagedBlockTables
from bt_tables._storage import Storage
from bt_tables.devices import CudaExecutor, StepLaunch

WIDTHS = (2048, 16_384)
STEPS = 200


class TimedExecutor(CudaExecutor):
    """Puts events around every launch."""

    def __init__(self) -> None:
        """Use the current device."""
        super().__init__(torch.device("cuda"))
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return the kernel's launcher between two events."""
        inner = super().step_launch(storage)

        def launch(
            packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
        ) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
            begin.record()
            inner(packet, starts, positions, programs)
            end.record()
            self.spans.append((begin, end))

        return launch

    def kernel_us(self, launches_a_step: int) -> float:
        """Median of a step's kernel time, in microseconds."""
        torch.cuda.synchronize()
        spans = [begin.elapsed_time(end) * 1000 for begin, end in self.spans]
        self.spans.clear()
        return float(np.median(np.reshape(spans, (-1, launches_a_step)).sum(axis=1)))


def measure(name: str, width: int, *, fused: bool, timed: bool) -> float:
    """Median microseconds of a step: of its kernels if timed, of the host if not."""
    executor = TimedExecutor() if timed else CudaExecutor(torch.device("cuda"))
    tables = StagedBlockTables(layouts(width), device=executor)
    batch = decode_batch()
    resident = batch._replace(
        query_start_loc=torch.from_numpy(np.asarray(batch.query_start_loc)).cuda(),
        positions=torch.from_numpy(np.asarray(batch.positions)).cuda(),
    )
    first = start()
    tables.stage(first.rows, first.counts, first.ids, overwrite=True)
    tables.step(batch)
    turns = [WORKLOADS[name](step) for step in range(256)]
    if isinstance(executor, TimedExecutor):
        executor.kernel_us(1)
    host_us = []
    for step in range(STEPS):
        turn = turns[step % 256]
        begin = time.perf_counter_ns()
        tables.stage(turn.rows, turn.counts, turn.ids, overwrite=turn.overwrite)
        if fused:
            tables.step(resident)
        else:
            # a gather that finds the batch as it was has nothing to launch
            tables.apply_staged_writes()
            tables.gather_block_tables(resident.idx_mapping, REQUESTS)
            tables.compute_slot_mappings(
                resident.idx_mapping, resident.query_start_loc, resident.positions, REQUESTS
            )
        host_us.append((time.perf_counter_ns() - begin) / 1000)
        torch.cuda.synchronize()
    if isinstance(executor, TimedExecutor):
        return executor.kernel_us(len(executor.spans) // STEPS)
    return float(np.median(host_us))


def check_equal(width: int) -> None:
    """Fail unless the GPU's tables and slots equal the CPU's on every workload."""
    for name, workload in WORKLOADS.items():
        found = []
        for device in ("cuda", "cpu"):
            tables = StagedBlockTables(layouts(width), device=device)
            for turn in (start(), *(workload(step) for step in range(3))):
                tables.stage(turn.rows, turn.counts, turn.ids, overwrite=turn.overwrite)
                result = tables.step(decode_batch())
            found.append([*result.block_tables, result.slot_mappings])
        if not all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(*found, strict=True)):
            raise SystemExit(f"{name}: the GPU's tables differ from the CPU's: no times")


def main() -> int:
    """Compare, measure, print; return 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for width in WIDTHS:
        check_equal(width)
    print("tables and slots equal the CPU's; medians in us, starts and positions on the device")
    print("workload  width   kernels: one launch  separate   host: one launch  separate")
    for name in WORKLOADS:
        for width in WIDTHS:
            kernel, kernels, host, hosts = (
                measure(name, width, fused=fused, timed=timed)
                for timed in (True, False)
                for fused in (True, False)
            )
            print(
                f"{name:<8} {width:>6} {kernel:>20.1f} {kernels:>9.1f} {host:>18.1f} {hosts:>9.1f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
