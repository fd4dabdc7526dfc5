"""Compares steps with the pure contract: every row, every slot and the pools' counts.

What a table holds is derived again from the block ids of each request by ``bt_width`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from bt_runner.arrays import Ints, Tokens, ragged
from bt_runner.errors import VerificationError
from bt_runner.input_batch import InputBatch
from bt_runner.kv_cache_manager import KVCacheManager
from bt_runner.scheduler import SchedulerOutput
from bt_tables import StepTables
from bt_width import NULL_BLOCK, PAD_SLOT, BlockTableLayout

_LocateAll: TypeAlias = Callable[[Ints], tuple[Ints, Ints, Ints]]
"""The contract's arithmetic for one position, which is right for an array of them."""


class StepCheck:
    """Compares one step's tables with the contract.

    Attributes:
        kv: Which row holds which blocks.
    """

    def __init__(
        self,
        names: Sequence[str],
        kv: KVCacheManager,
        layouts: Sequence[BlockTableLayout] | None = None,
    ) -> None:
        """Take the groups' names, which row holds which blocks, and another rank's plans."""
        self.kv = kv
        self._names = tuple(names)
        self._layouts = layouts or [group.layout for group in kv.groups]

    def check(self, batch: SchedulerOutput, inputs: InputBatch, tables: StepTables) -> None:
        """Compare every row and slot of a step, and the pools' counts.

        Raises:
            VerificationError: The first difference.
        """
        num_reqs, num_tokens = len(batch.rows), int(batch.num_tokens.sum())
        for group, layout in enumerate(self._layouts):
            found = tables.block_tables[group].cpu().numpy()
            rows = np.full_like(found[:num_reqs], NULL_BLOCK)
            for place, row in enumerate(batch.rows.tolist()):
                ids = layout.addressing.expand(self.kv.block_ids_of(row, group))
                rows[place, : len(ids)] = ids
            self._check_rows(group, batch, found[:num_reqs], rows)
            self._check_padding(group, found[num_reqs:], NULL_BLOCK)
            slots = tables.slot_mappings[group].cpu().numpy()
            self._check_slots(group, batch, slots[:num_tokens], rows)
            self._check_padding(group, slots[num_tokens : inputs.num_tokens], PAD_SLOT)
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

    def _check_rows(
        self, group: int, batch: SchedulerOutput, found: Tokens, expected: Tokens
    ) -> None:
        for place, column in np.argwhere(found != expected)[:1].tolist():
            request_id = batch.requests[place].request_id
            raise self._difference(
                group,
                f"column {column} of request {request_id}",
                int(expected[place, column]),
                int(found[place, column]),
                request=request_id,
                column=column,
            )

    def _check_slots(self, group: int, batch: SchedulerOutput, found: Ints, rows: Tokens) -> None:
        layout, references = self._layouts[group], self.kv.pools[group].references
        places = np.repeat(np.arange(len(batch.rows)), batch.num_tokens)
        positions = ragged(batch.starts, batch.num_tokens)
        expected = np.full(len(positions), PAD_SLOT, np.int64)
        columns = np.zeros_like(positions)
        if layout.slot_mode != "none":
            locate = cast(_LocateAll, layout.addressing.locate)
            ranks, columns, offsets = locate(positions)
            has_block = columns < rows.shape[1]
            if layout.shards > 1:
                has_block &= ranks == layout.limits.context_parallel.rank
            ids = rows[places[has_block], columns[has_block]].astype(np.int64)
            slots = ids * layout.kernel_block_size + offsets[has_block]
            expected[has_block] = np.where(ids == NULL_BLOCK, PAD_SLOT, slots)
        is_shared = (expected != PAD_SLOT) & (references[expected // layout.block_size] > 1)
        for token in ((found != expected) | is_shared).nonzero()[0][:1].tolist():
            request_id = batch.requests[places[token]].request_id
            column = int(columns[token])
            what = f"slot of position {positions[token]} (column {column}) of request {request_id}"
            raise self._difference(
                group,
                f"{what}, whose block is shared," if is_shared[token] else what,
                int(expected[token]),
                int(found[token]),
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
