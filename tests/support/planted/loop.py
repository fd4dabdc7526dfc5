"""A running loop under a sanitizer, into whose next step a fault is planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from tests.support.small_engine import SmallEngine, SmallStep, Tables

from bt_tables.sanitizer import BlockTableSanitizer, FaultKind, Finding, SanitizerReport
from bt_width import BlockTableLayout

MakeTables = Callable[[Sequence[BlockTableLayout], Sequence[int]], Tables]
T = TypeVar("T")


@dataclass(frozen=True)
class Expected:
    """The finding that a planted fault must lead to; what is None may be anything."""

    kind: FaultKind
    group: int | None = None
    row: int | None = None
    column: int | None = None
    token: int | None = None
    other_owner: int | None = None

    def is_met_by(self, finding: Finding) -> bool:
        """Whether a finding says so."""
        names = ("kind", "group", "row", "column", "token", "other_owner")
        pairs = [(getattr(self, name), getattr(finding, name)) for name in names]
        return all(wanted is None or wanted == found for wanted, found in pairs)


@dataclass(frozen=True)
class Planted:
    """A step with a fault in it, and what must be found."""

    step: SmallStep
    expected: Expected


class Loop:
    """Sound steps, each checked, up to the one that a fault is planted into."""

    def __init__(
        self,
        make_tables: MakeTables,
        layouts: Sequence[BlockTableLayout],
        num_blocks: Sequence[int],
        seed: int = 0,
    ) -> None:
        self.layouts = layouts
        self.num_blocks = num_blocks
        self.engine = SmallEngine(layouts, num_blocks, make_tables(layouts, num_blocks), seed)
        self.sanitizer = BlockTableSanitizer(
            layouts, num_blocks, mode="report", max_findings=10_000
        )
        self.last: SmallStep | None = None
        self.last_tables: list[torch.Tensor] = []

    def check(self, step: SmallStep, *, with_refs: bool = True) -> SanitizerReport:
        """Check a step."""
        return self.sanitizer.check(
            step.block_tables,
            step.slot_mappings,
            step.seq_lens,
            step.query_start_loc,
            num_blocks_of_row=step.num_blocks_of_row,
            ref_counts=step.ref_counts if with_refs else None,
            ref_blocks=step.ref_blocks if with_refs else None,
        )

    def until(self, wanted: Callable[[SmallStep], T | None]) -> tuple[SmallStep, T]:
        """Run sound steps until one has what is wanted; that one is not checked yet."""
        for _ in range(400):
            step = self.engine.step()
            found = wanted(step)
            if found is not None:
                return step, found
            self.sound(step)
        raise AssertionError("no step had what the fault needs")

    def after(self, wanted: Callable[[SmallStep], T | None]) -> tuple[SmallStep, T]:
        """Run sound steps up to and with one that has what is wanted."""
        step, found = self.until(wanted)
        self.sound(step)
        return step, found

    def sound(self, step: SmallStep) -> None:
        """Check a step that must have no fault."""
        report = self.check(step)
        assert report.findings == (), report.text
        self.last = step
        self.last_tables = [table.clone() for table in step.block_tables]

    def live(self, step: SmallStep, group: int, row: int) -> int:
        """Return the columns of a row's blocks."""
        blocks = int(step.num_blocks_of_row[row, group])
        return blocks * self.layouts[group].kernel_blocks_per_block

    def was_live(self, group: int, row: int) -> int:
        """Return the columns that a row of the batch had in the last step."""
        if self.last is None or row >= len(self.last.requests):
            return 0
        return self.live(self.last, group, row)


def tokens_of(step: SmallStep, row: int) -> range:
    """Return a request's tokens."""
    return range(int(step.query_start_loc[row]), int(step.query_start_loc[row + 1]))


def position_of(step: SmallStep, row: int, token: int) -> int:
    """Return a token's place in its request."""
    return int(step.seq_lens[row]) - int(step.query_start_loc[row + 1]) + token


def rows_of(step: SmallStep) -> range:
    """Return the rows that hold a request."""
    return range(len(step.requests))
