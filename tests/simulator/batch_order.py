"""Drives the table class in batch order by the KV cache manager's edits, beside a model runner."""

from __future__ import annotations

from itertools import islice

import torch

from bt_runner.input_batch import InputBatch
from bt_runner.kv_cache_manager import TableEdits
from bt_runner.scheduler import SchedulerOutput
from bt_tables import MultiGroupBlockTable, StepTables


class BatchOrderDriver:
    """Rows in batch order: requests change places until the batch stands first.

    Attributes:
        tables: What is driven.
    """

    def __init__(self, tables: MultiGroupBlockTable) -> None:
        """Drive ``tables``."""
        self.tables = tables
        num_rows = tables.layouts[0].limits.max_num_reqs
        self._row_at: list[int | None] = [None] * num_rows
        self._place_of: dict[int, int] = {}
        self._num_reqs = 0

    def stage(self, batch: SchedulerOutput, edits: TableEdits) -> None:
        """Edit the rows, and put those of the batch first."""
        for row, group, num_blocks in edits.null_prefixes:
            self.tables.null_prefix(self._place_of[row], group, num_blocks)
        for row in edits.cleared:
            place = self._place_of.pop(row, None)
            if place is not None:
                self.tables.clear_row(place)
                self._row_at[place] = None
        ids = iter(edits.block_ids.tolist())
        for row, counts in zip(edits.rows.tolist(), edits.counts.tolist(), strict=True):
            self._grow(row, [list(islice(ids, count)) for count in counts])
        for place, row in enumerate(batch.rows.tolist()):
            self._bring(row, place)
        self._num_reqs = len(batch.rows)

    def step(self, inputs: InputBatch) -> StepTables:
        """Commit, and return the tables and slots of the batch that was staged."""
        return self._commit(self._num_reqs, inputs)

    def dummy_step(self, inputs: InputBatch) -> StepTables:
        """Return the tables and slots of a batch of padding; the rows come back later."""
        return self._commit(0, inputs)

    def _commit(self, num_reqs: int, inputs: InputBatch) -> StepTables:
        self.tables.commit(num_reqs)
        slots = self.tables.compute_slot_mappings(
            inputs.query_start_loc_host, inputs.positions, inputs.num_tokens
        )
        return StepTables(self._first_rows(inputs.num_reqs), slots)

    def _grow(self, row: int, block_ids: list[list[int]]) -> None:
        place = self._place_of.get(row)
        if place is not None:
            self.tables.append_row(block_ids, place)
            return
        place = self._row_at.index(None)
        self.tables.add_row(block_ids, place)
        self._put(row, place)

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
