"""Both table classes behind one step: a plan is staged, then a batch gets tables and slots."""

from __future__ import annotations

import random
from typing import Protocol

import torch

from bt_runner.execution.batch import BatchArrays
from bt_runner.execution.staging import stage_plan
from bt_runner.scheduling.step_plan import Scheduled, StepPlan
from bt_tables import MultiGroupBlockTable, StagedBlockTables, StepTables


class TableDriver(Protocol):
    """One table class, driven by the scheduler's plans."""

    @property
    def tables(self) -> MultiGroupBlockTable | StagedBlockTables:
        """The tables that are driven."""

    def stage(self, plan: StepPlan) -> None:
        """Edit the rows as a plan says."""

    def step(self, batch: BatchArrays) -> StepTables:
        """Return the tables and slots of a batch."""

    def dummy_step(self, batch: BatchArrays) -> StepTables:
        """Return the tables and slots of a batch of the same size in which nobody is."""


class StagedDriver:
    """Rows by request: a batch names its rows."""

    def __init__(self, tables: StagedBlockTables, draw: random.Random) -> None:
        """Drive ``tables``; ``draw`` decides which steps are made of separate calls."""
        self.tables = tables
        self._draw = draw

    def stage(self, plan: StepPlan) -> None:
        """Edit the rows as a plan says."""
        stage_plan(self.tables, plan)

    def step(self, batch: BatchArrays) -> StepTables:
        """Return the tables and slots of a batch, from one call or from three."""
        if self._draw.random() < 0.7:
            return self.tables.step(batch.for_tables())
        self.tables.apply_staged_writes()
        slots = self.tables.compute_slot_mappings(
            batch.rows, batch.query_start_loc_host, batch.positions, batch.num_tokens
        )
        return StepTables(self.tables.gather_block_tables(batch.rows, batch.num_reqs), slots)

    def dummy_step(self, batch: BatchArrays) -> StepTables:
        """Return the tables and slots of a batch of padding."""
        if self._draw.random() < 0.5:
            return self.tables.step(batch.for_tables())
        return StepTables(
            self.tables.dummy_block_tables(batch.num_reqs),
            self.tables.dummy_slot_mappings(batch.num_tokens),
        )


class BatchOrderDriver:
    """Rows in batch order: requests change places until the batch stands first."""

    def __init__(self, tables: MultiGroupBlockTable) -> None:
        """Drive ``tables``."""
        self.tables = tables
        num_rows = tables.layouts[0].limits.max_num_reqs
        self._row_at: list[int | None] = [None] * num_rows
        self._place_of: dict[int, int] = {}
        self._num_reqs = 0

    def stage(self, plan: StepPlan) -> None:
        """Edit the rows as a plan says, and put those of its batch first."""
        for row, group, num_blocks in plan.null_prefixes:
            self.tables.null_prefix(self._place_of[row], group, num_blocks)
        for row in plan.cleared_rows:
            place = self._place_of.pop(row, None)
            if place is not None:
                self.tables.clear_row(place)
                self._row_at[place] = None
        for part in plan.scheduled:
            self._grow(part)
        for place, part in enumerate(plan.scheduled):
            self._bring(part.row, place)
        self._num_reqs = len(plan.scheduled)

    def step(self, batch: BatchArrays) -> StepTables:
        """Commit, and return the tables and slots of a batch."""
        self.tables.commit(self._num_reqs)
        slots = self.tables.compute_slot_mappings(
            batch.query_start_loc_host, batch.positions, batch.num_tokens
        )
        return StepTables(self._first_rows(batch.num_reqs), slots)

    def dummy_step(self, batch: BatchArrays) -> StepTables:
        """Return the tables and slots of a batch of padding; the rows come back later."""
        self.tables.commit(0)
        slots = self.tables.compute_slot_mappings(
            batch.query_start_loc_host, batch.positions, batch.num_tokens
        )
        return StepTables(self._first_rows(batch.num_reqs), slots)

    def _grow(self, part: Scheduled) -> None:
        place = self._place_of.get(part.row)
        if place is not None:
            self.tables.append_row(part.new_block_ids, place)
            return
        place = self._row_at.index(None)
        self.tables.add_row(part.new_block_ids, place)
        self._put(part.row, place)

    def _bring(self, row: int, place: int) -> None:
        old, other = self._place_of[row], self._row_at[place]
        if other == row:
            return
        if other is None:
            self.tables.move_row(old, place)
            self._row_at[old] = None
        else:
            self.tables.swap_rows(old, place)
            self._put(other, old)
        self._put(row, place)

    def _put(self, row: int, place: int) -> None:
        self._row_at[place] = row
        self._place_of[row] = place

    def _first_rows(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        groups = range(len(self.tables.layouts))
        return tuple(self.tables.block_table(group)[:num_reqs] for group in groups)
