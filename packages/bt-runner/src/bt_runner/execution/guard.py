"""The sanitizer on guard: every step's tables against the pools' books, before a layer reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bt_runner.execution.batch import BatchArrays
from bt_runner.scheduling.block_pool import BlockPool
from bt_runner.scheduling.step_plan import Scheduled
from bt_tables import BlockTableSanitizer, StepTables
from bt_width import BlockTableLayout


class TableGuard:
    """Checks steps, and raises at the first that would touch what it may not."""

    def __init__(self, layouts: Sequence[BlockTableLayout], pools: Sequence[BlockPool]) -> None:
        """Take how the tables are planned, and who holds which blocks."""
        self._pools = tuple(pools)
        self._sanitizer = BlockTableSanitizer(layouts, [pool.num_blocks for pool in pools])

    def check(self, scheduled: Sequence[Scheduled], batch: BatchArrays, tables: StepTables) -> None:
        """Check a step.

        Raises:
            BlockTableFaultError: It names group, request and column.
        """
        device = batch.seq_lens.device
        held = [[len(ids) for ids in part.request.block_ids] for part in scheduled]
        num_tokens = sum(part.num_tokens for part in scheduled)
        self._sanitizer.check(
            tables.block_tables,
            tables.slot_mappings,
            batch.seq_lens[: len(scheduled)],
            batch.query_start_loc[: len(scheduled) + 1].clamp(max=num_tokens),
            num_blocks_of_row=torch.tensor(held, dtype=torch.int32).to(device),
            ref_counts=[
                torch.tensor(pool.reference_counts(), dtype=torch.int32).to(device)
                for pool in self._pools
            ],
        )
