"""Host time of a step of ``StagedBlockTables``, beside copying every row of every group.

One thread, the launch left out, one real copy from host to host. First the tables are
compared with the baseline's, and no time is printed on a difference. The machine's speed
is measured with the baseline in the same process and in turn, because the clocks of
shared machines move: the bounds hold for a machine whose baseline takes 4,000 us.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.table_workloads import WORKLOADS, Turn, WholeRows, decode_batch, layouts, start

from bt_tables import StagedBlockTables
from bt_tables._storage import Storage
from bt_tables.devices import CpuExecutor, StepLaunch

WIDTHS = (2048, 16_384)
BOUNDS_US = {"steady": 19.0, "burst": 60.0, "prompt": 55.0}
REFERENCE_BASELINE_US = 4000.0
_STEPS_A_ROUND = 300
_LIST_STEPS_A_ROUND = 50
_REST_S = 0.1


class NoLaunch(CpuExecutor):
    """Copies the packet, launches nothing, and counts what it copies."""

    bytes_sent = 0

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy and count."""
        self.bytes_sent = source.nbytes
        super().copy(destination, source)

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return a launch that does nothing."""
        del storage

        def launch(
            packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
        ) -> None:
            """Leave the launch out."""

        return launch


def check_equal(workload: Callable[[int], Turn], width: int) -> None:
    """Fail unless our tables and the baseline's are equal after the same steps."""
    tables = StagedBlockTables(layouts(width), device="cpu")
    baseline = WholeRows([layout.width for layout in layouts(width)])
    batch = decode_batch()
    for turn in (start(), *(workload(step) for step in range(3))):
        tables.stage(turn.rows, turn.counts, turn.ids, overwrite=turn.overwrite)
        found = tables.step(batch)
        baseline.step(turn)
        if not all(map(torch.equal, found.block_tables, baseline.tables)):
            raise SystemExit("the tables differ from the baseline's: no times")


class Case:
    """One workload at one width, measured in rounds."""

    def __init__(self, name: str, width: int, *, lists: bool) -> None:
        """Prepare the turns and the tables."""
        self.name, self.width, self.lists = name, width, lists
        self.executor = NoLaunch()
        self.tables = StagedBlockTables(layouts(width), device=self.executor)
        self._turns = [WORKLOADS[name](step) for step in range(256)]
        self._list_turns = [turn.lists() for turn in self._turns] if lists else []
        self._batch = decode_batch()
        self.times_us: list[float] = []

    def round(self) -> None:
        """Run one round of steps on rows that start anew."""
        first = start()
        self.tables.stage(first.rows, first.counts, first.ids, overwrite=True)
        self.tables.step(self._batch)
        for step in range(_LIST_STEPS_A_ROUND if self.lists else _STEPS_A_ROUND):
            begin = time.perf_counter_ns()
            self._edit(step % 256)
            self.tables.step(self._batch)
            self.times_us.append((time.perf_counter_ns() - begin) / 1000)

    def _edit(self, step: int) -> None:
        turn = self._turns[step]
        if not self.lists:
            self.tables.stage(turn.rows, turn.counts, turn.ids, overwrite=turn.overwrite)
            return
        for row, ids in self._list_turns[step]:
            self.tables.append_block_ids(row, ids, overwrite=turn.overwrite)


def baseline_us(baseline: WholeRows, turn: Turn) -> float:
    """One step of the baseline, in microseconds."""
    # a machine that rations its processor lets a rested process run at full speed
    time.sleep(_REST_S)
    begin = time.perf_counter_ns()
    baseline.step(turn)
    return (time.perf_counter_ns() - begin) / 1000


def main(arguments: list[str] | None = None) -> int:
    """Compare, measure, print; with ``--check`` fail where a median is past its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each case")
    parser.add_argument("--check", action="store_true", help="fail past the bounds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread")
    for workload in WORKLOADS.values():
        for width in WIDTHS:
            check_equal(workload, width)

    cases = [
        Case(name, width, lists=lists)
        for lists in (False, True)
        for name in WORKLOADS
        for width in WIDTHS
    ]
    baselines = {(name, width): WholeRows([width] * 3) for name in WORKLOADS for width in WIDTHS}
    whole_us: dict[tuple[str, int], list[float]] = {key: [] for key in baselines}
    gc.disable()
    for number in range(options.rounds):
        for (name, width), baseline in baselines.items():
            baseline.step(start())
            whole_us[name, width].append(baseline_us(baseline, WORKLOADS[name](number)))
        for case in cases:
            case.round()
    gc.enable()
    return _report(cases, whole_us, check=options.check)


def _report(cases: list[Case], whole_us: dict[tuple[str, int], list[float]], *, check: bool) -> int:
    # the baseline's fastest round: neighbours that take memory bandwidth slow it, not us
    speed = min(whole_us["steady", WIDTHS[-1]]) / REFERENCE_BASELINE_US
    print(
        f"tables equal the baseline's; the baseline at width {WIDTHS[-1]} takes "
        f"{speed * REFERENCE_BASELINE_US:,.0f} us: bounds x {speed:.2f}"
    )
    print("                          us a step                     bytes sent   whole rows")
    print("workload  width  ids      p10    median    p90   bound   each step           us")
    late = 0
    for case in cases:
        low, median, high = np.percentile(case.times_us, [10, 50, 90])
        bound = BOUNDS_US[case.name] * speed
        shown = "-" if case.lists else f"{bound:.1f}"
        whole = min(whole_us[case.name, case.width])
        print(
            f"{case.name:<8} {case.width:>6}  {'lists ' if case.lists else 'arrays'} "
            f"{low:>7.1f} {median:>8.1f} {high:>7.1f} {shown:>7} {case.executor.bytes_sent:>11,} "
            f"{whole:>12,.0f}"
        )
        late += not case.lists and median > bound
    return int(check and late > 0)


if __name__ == "__main__":
    sys.exit(main())
