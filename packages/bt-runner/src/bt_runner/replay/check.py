"""Compares steps with the pure contract: every row, every slot and the pools' counts.

What a table holds is derived again from the block ids of each request by ``bt_width``
alone, one token and one row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bt_runner.errors import VerificationError
from bt_runner.input_batch import InputBatch
from bt_runner.kv_cache_manager import KVCacheManager
from bt_runner.scheduler import SchedulerOutput
from bt_tables import StepTables
from bt_width import NULL_BLOCK, PAD_SLOT, BlockTableLayout


class StepCheck:
    """Compares one step's tables with the contract.

    Attributes:
        kv: Who holds which blocks.
    """

    def __init__(
        self,
        names: Sequence[str],
        kv: KVCacheManager,
        layouts: Sequence[BlockTableLayout] | None = None,
    ) -> None:
        """Take what the groups are called, who holds which blocks, and another rank's plans."""
        self.kv = kv
        self._names = tuple(names)
        self._layouts = layouts or [group.layout for group in kv.groups]

    def check(self, batch: SchedulerOutput, inputs: InputBatch, tables: StepTables) -> None:
        """Compare every row and slot of a step, and the pools' counts.

        Raises:
            VerificationError: The first difference.
        """
        ends = batch.num_tokens.cumsum().tolist()
        starts = [0, *ends[:-1]]
        count = len(ends)
        for group, layout in enumerate(self._layouts):
            columns = tables.block_tables[group].cpu().numpy()
            slots = tables.slot_mappings[group].cpu().numpy()
            for place, (row, request) in enumerate(
                zip(batch.rows.tolist(), batch.requests, strict=True)
            ):
                ids = layout.expand(self.kv.block_ids_of(row, group))
                self._check_row(group, request.request_id, columns[place], ids)
                first = int(batch.starts[place])
                found = slots[starts[place] : ends[place]]
                self._check_slots(group, request.request_id, first, found, ids)
            self._check_padding(group, columns[count:], NULL_BLOCK)
            self._check_padding(group, slots[ends[-1] : inputs.num_tokens], PAD_SLOT)
        self.check_counts()

    def check_counts(self) -> None:
        """Compare what rows hold with the reference counts of the pools.

        Raises:
            VerificationError: The first difference.
        """
        for index, group in enumerate(self.kv.groups):
            rows = group.held.nonzero()[0].tolist()
            ids = [block for row in rows for block in self.kv.block_ids_of(row, index)]
            held = np.bincount(
                np.array([block for block in ids if block != NULL_BLOCK], np.int64),
                minlength=group.pool.num_blocks,
            )
            num_held = int(np.count_nonzero(held))
            if num_held != group.pool.num_used:
                raise self._difference(index, "blocks in use", num_held, group.pool.num_used)
            wrong = (held != group.pool.references).nonzero()[0]
            if len(wrong):
                block = int(wrong[0])
                counted = int(group.pool.references[block])
                what = f"references of block {block}"
                raise self._difference(index, what, int(held[block]), counted)

    def _check_row(
        self, group: int, request_id: str, found: NDArray[np.int32], ids: Sequence[int]
    ) -> None:
        expected = np.full(found.shape, NULL_BLOCK, dtype=np.int32)
        expected[: len(ids)] = ids
        if not np.array_equal(found, expected):
            column = int((found != expected).argmax())
            raise self._difference(
                group,
                f"column {column} of request {request_id}",
                int(expected[column]),
                int(found[column]),
                request=request_id,
                column=column,
            )

    def _check_slots(
        self,
        group: int,
        request_id: str,
        first: int,
        found: NDArray[np.int64],
        ids: Sequence[int],
    ) -> None:
        layout, references = self._layouts[group], self.kv.pools[group].references
        for position, slot in enumerate(found.tolist(), start=first):
            expected = PAD_SLOT if layout.slot_mode == "none" else layout.slot(position, ids)
            shared = slot != PAD_SLOT and references[slot // layout.block_size] > 1
            if slot != expected or shared:
                column = 0 if layout.slot_mode == "none" else layout.locate(position).column
                what = f"slot of position {position} (column {column}) of request {request_id}"
                raise self._difference(
                    group,
                    f"{what}, whose block is shared," if shared else what,
                    expected,
                    slot,
                    request=request_id,
                    column=column,
                )

    def _check_padding(self, group: int, found: NDArray[np.generic], expected: int) -> None:
        if (found != expected).any():
            stray = found[found != expected].tolist()[0]
            raise self._difference(group, "padding after the batch", expected, stray)

    def _difference(
        self, group: int, what: str, expected: int, found: int, **details: object
    ) -> VerificationError:
        return VerificationError(
            f"group {self._names[group]}: {what}: expected {expected}, found {found}",
            group=self._names[group],
            expected=expected,
            found=found,
            **details,
        )
