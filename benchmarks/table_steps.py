"""Host time of a step of both table classes, beside copying every row of every group.

One thread, the launch left out, one real copy from host to host. First the tables are
compared with the baseline's, and no time is printed on a difference. Times are of the
processor. The machine's speed is measured with the baseline in the same process and in
turn, because the clocks of shared machines move: the bounds hold for a machine whose
baseline takes 4,000 us. A batch-order table edits, or swaps 16 pairs of rows, and commits.
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

from benchmarks.table_workloads import (
    GROUPS,
    REQUESTS,
    SWAPS,
    WORKLOADS,
    Turn,
    WholeRows,
    decode_batch,
    layouts,
    start,
)

from bt_tables import MultiGroupBlockTable, StagedBlockTables
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


class Staged:
    """Rows by request: each turn is staged, and the decode batch stepped."""

    name = "staged"

    def __init__(self, width: int, device: CpuExecutor | str) -> None:
        """Make empty tables."""
        self.tables = StagedBlockTables(layouts(width), device=device)
        self._batch = decode_batch()

    def edit(self, turn: Turn) -> None:
        """Hand a turn over as arrays."""
        self.tables.stage(turn.rows, turn.counts, turn.ids, overwrite=turn.overwrite)

    def edit_row(self, row: int, ids: list[list[int]], *, overwrite: bool) -> None:
        """Hand a row over as lists."""
        self.tables.append_block_ids(row, ids, overwrite=overwrite)

    def step(self) -> tuple[torch.Tensor, ...]:
        """Carry out what was handed over."""
        return self.tables.step(self._batch).block_tables


class BatchOrder:
    """Rows in batch order: each turn is appended and committed."""

    name = "batch order"

    def __init__(self, width: int, device: CpuExecutor | str) -> None:
        """Make empty tables."""
        self.tables = MultiGroupBlockTable(layouts(width), device=device)

    def edit(self, turn: Turn) -> None:
        """Hand a turn over as arrays, and exchange its pairs of rows."""
        if len(turn.rows):
            self.tables.append_rows(turn.rows, turn.counts, turn.ids, overwrite=turn.overwrite)
        for first, second in turn.swaps:
            self.tables.swap_rows(first, second)

    def edit_row(self, row: int, ids: list[list[int]], *, overwrite: bool) -> None:
        """Hand a row over as lists."""
        if overwrite:
            self.tables.add_row(ids, row)
        else:
            self.tables.append_row(ids, row)

    def step(self) -> tuple[torch.Tensor, ...]:
        """Carry out what was handed over."""
        self.tables.commit(REQUESTS)
        return tuple(self.tables.block_table(group) for group in range(GROUPS))


KINDS = (Staged, BatchOrder)


def check_equal(workload: Callable[[int], Turn], width: int) -> None:
    """Fail unless the tables of both classes and the baseline's are equal after the same steps."""
    for kind in KINDS:
        for lists in (False, True):
            tables = kind(width, "cpu")
            baseline = WholeRows([layout.width for layout in layouts(width)])
            for turn in (start(), *(workload(step) for step in range(3))):
                if lists:
                    for row, ids in turn.lists():
                        tables.edit_row(row, ids, overwrite=turn.overwrite)
                else:
                    tables.edit(turn)
                found = tables.step()
                baseline.step(turn)
                if not all(map(torch.equal, found, baseline.tables)):
                    raise SystemExit("the tables differ from the baseline's: no times")


class Case:
    """One workload at one width, measured in rounds."""

    def __init__(self, kind: type[Staged | BatchOrder], name: str, width: int, *, lists: bool):
        """Prepare the turns and the tables."""
        self.kind, self.name, self.width, self.lists = kind.name, name, width, lists
        self.executor = NoLaunch()
        self.tables = kind(width, self.executor)
        self._turns = [(WORKLOADS | SWAPS)[name](step) for step in range(256)]
        self._list_turns = [turn.lists() for turn in self._turns] if lists else []
        self.times_us: list[float] = []

    def round(self) -> None:
        """Run one round of steps on rows that start anew."""
        self.tables.edit(start())
        self.tables.step()
        for step in range(_LIST_STEPS_A_ROUND if self.lists else _STEPS_A_ROUND):
            begin = time.process_time_ns()
            self._edit(step % 256)
            self.tables.step()
            self.times_us.append((time.process_time_ns() - begin) / 1000)

    def _edit(self, step: int) -> None:
        turn = self._turns[step]
        if not self.lists:
            self.tables.edit(turn)
            return
        for row, ids in self._list_turns[step]:
            self.tables.edit_row(row, ids, overwrite=turn.overwrite)


def baseline_us(baseline: WholeRows, turn: Turn) -> float:
    """One step of the baseline, in microseconds."""
    # a machine that rations its processor lets a rested process run at full speed
    time.sleep(_REST_S)
    begin = time.process_time_ns()
    baseline.step(turn)
    return (time.process_time_ns() - begin) / 1000


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
        Case(kind, name, width, lists=lists)
        for kind in KINDS
        for lists in (False, True)
        for name in WORKLOADS
        for width in WIDTHS
    ]
    cases += [Case(BatchOrder, name, width, lists=False) for name in SWAPS for width in WIDTHS]
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
    print("                                       us a step                     bytes sent   whole")
    print(
        "rows        workload  width  ids      best     median    p90   bound   each step  rows us"
    )
    late = 0
    for case in cases:
        low, median, high = np.percentile(case.times_us, [0, 50, 90])
        has_bound = case.kind == Staged.name and not case.lists
        bound = BOUNDS_US[case.name] * speed if has_bound else 0.0
        whole = whole_us.get((case.name, case.width), [0.0])
        print(
            f"{case.kind:<11} {case.name:<8} {case.width:>6}  "
            f"{'lists ' if case.lists else 'arrays'} {low:>7.1f} {median:>9.1f} {high:>8.1f} "
            f"{f'{bound:.1f}' if has_bound else '-':>7} {case.executor.bytes_sent:>11,} "
            f"{min(whole):>9,.0f}"
        )
        late += has_bound and median > bound
    return int(check and late > 0)


if __name__ == "__main__":
    sys.exit(main())
