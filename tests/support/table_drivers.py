"""The small engine's requests on both table classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bt_tables import MultiGroupBlockTable, StagedBlockTables, StepBatch
from bt_width import BlockTableLayout


class StagedTables:
    """Rows by request, staged and stepped."""

    def __init__(self, layouts: Sequence[BlockTableLayout], num_blocks: Sequence[int]) -> None:
        self.tables = StagedBlockTables(layouts, device="cpu", num_blocks=num_blocks)

    def add(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        self.tables.append_block_ids(row, blocks, overwrite=True)

    def append(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        self.tables.append_block_ids(row, blocks)

    def clear(self, row: int) -> None:
        self.tables.clear_row(row)

    def null_prefix(self, row: int, group: int, num_blocks: int) -> None:
        self.tables.null_prefix(row, group, num_blocks)

    def batch(self, rows: Sequence[int]) -> Sequence[int]:
        return rows

    def fill(
        self,
        rows: Sequence[int],
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_reqs_padded: int,
        num_tokens_padded: int,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        batch = StepBatch(
            idx_mapping=np.array(rows, np.int32),
            query_start_loc=query_start_loc,
            positions=positions,
            num_reqs_padded=num_reqs_padded,
            num_tokens_padded=num_tokens_padded,
        )
        made = self.tables.step(batch)
        return made.block_tables, made.slot_mappings


class BatchTables:
    """Rows in batch order: a leaving request's place is taken by the last one."""

    def __init__(self, layouts: Sequence[BlockTableLayout], num_blocks: Sequence[int]) -> None:
        self.tables = MultiGroupBlockTable(layouts, device="cpu", num_blocks=num_blocks)
        self.order: list[int] = []
        self.num_groups = len(layouts)

    def add(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        if row not in self.order:
            self.order.append(row)
        self.tables.add_row(blocks, self.order.index(row))

    def append(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        self.tables.append_row(blocks, self.order.index(row))

    def clear(self, row: int) -> None:
        place, last = self.order.index(row), len(self.order) - 1
        self.tables.clear_row(place)
        if place != last:
            self.tables.move_row(last, place)
            self.order[place] = self.order[last]
        self.order.pop()

    def null_prefix(self, row: int, group: int, num_blocks: int) -> None:
        self.tables.null_prefix(self.order.index(row), group, num_blocks)

    def batch(self, rows: Sequence[int]) -> Sequence[int]:
        if len(self.order) > 1 and rows:
            # the engine's shuffle decides which two change places
            a, b = self.order.index(rows[0]), self.order.index(rows[-1])
            self.tables.swap_rows(a, b)
            self.order[a], self.order[b] = self.order[b], self.order[a]
        return tuple(self.order)

    def fill(
        self,
        rows: Sequence[int],
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_reqs_padded: int,
        num_tokens_padded: int,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        self.tables.commit(len(rows))
        slots = self.tables.compute_slot_mappings(query_start_loc, positions, num_tokens_padded)
        tables = tuple(
            self.tables.block_table(group)[:num_reqs_padded] for group in range(self.num_groups)
        )
        return tables, slots
