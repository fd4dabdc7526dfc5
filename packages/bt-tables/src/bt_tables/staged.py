"""Rows by request index that live on the device; edits are staged and expanded there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ._launch.arrays import INT32, HostArray, flatten_ids, host_array, int_between
from ._launch.tokens import NO_TOKENS, read_tokens
from ._rows.device_rows import DeviceRows
from .base import BlockTables
from .step import StepBatch, StepTables

_NO_REQUESTS = np.empty(0, np.int32)


class StagedBlockTables(BlockTables):
    """Block tables whose rows belong to requests, whatever their place in the batch.

    Edits are checked and staged on the host, where nothing of them is visible. The next
    call that launches carries out all that is staged, whichever it is: ``step`` in a
    serving loop; ``apply_staged_writes``, ``gather_block_tables`` and
    ``compute_slot_mappings`` are parts of it. What such a call returns is read-only and
    stays true until the next one: a batch row that holds its request's whole row is
    extended in place.

    A call that raises has staged nothing, for any group.
    """

    _rows_are_batch = False
    _rows: DeviceRows

    def _make_rows(self) -> DeviceRows:
        return DeviceRows(self._engine, self._records, self._checks)

    def append_block_ids(
        self, row: int, block_ids: Sequence[Sequence[int]], *, overwrite: bool = False
    ) -> None:
        """Give a row more blocks.

        Args:
            row: The request's row.
            block_ids: One sequence of block ids a group.
            overwrite: Replace what the row holds.

        Raises:
            InvalidEditError: The row or an id is bad, or a group has no sequence.
            RowOverflowError: The row would hold more than it can.
        """
        counts, ids = flatten_ids(block_ids, self._records.num_groups)
        row = self._checks.row(row)
        self._checks.ids(ids, counts)
        self._rows.edits.stage(
            np.array([row], np.int32),
            counts.astype(np.int32)[None],
            ids.astype(np.int32),
            overwrite=overwrite,
        )

    def stage(
        self, rows: HostArray, counts: HostArray, ids: HostArray, *, overwrite: bool = False
    ) -> None:
        """Give many rows more blocks; a row may repeat, and edits apply in order.

        Args:
            rows: [M] int32 on the host.
            counts: Ids of each row and group, [M, G] int32 on the host.
            ids: Flat int32 on the host: row by row, within a row group by group.
            overwrite: Replace what the rows hold.

        Raises:
            InvalidEditError: A row or an id is bad, or a count is negative.
            RowOverflowError: A row would hold more than it can.
            WidthMismatchError: A dtype or shape is wrong, or an array is not on the host.
        """
        self._rows.edits.stage(
            host_array("rows", rows, INT32, 1),
            host_array("counts", counts, INT32, 2),
            host_array("ids", ids, INT32, 1),
            overwrite=overwrite,
        )

    def clear_row(self, row: int) -> None:
        """Take all blocks from a row.

        Raises:
            InvalidEditError: There is no such row.
        """
        self.append_block_ids(row, ((),) * self._records.num_groups, overwrite=True)

    def apply_staged_writes(self) -> None:
        """Carry out what is staged, in rows and in the batch rows that mirror them."""
        if self.layouts:
            self._rows.run(None, _NO_REQUESTS, None)

    def gather_block_tables(
        self, idx_mapping: HostArray, num_reqs_padded: int
    ) -> tuple[torch.Tensor, ...]:
        """Return one [num_reqs_padded, W] table a group, in batch order.

        Args:
            idx_mapping: Row of each request, [N] int32 on the host; -1 is padding.
            num_reqs_padded: Rows to return; those from N on are null.

        Raises:
            InvalidEditError: A row or the padded count is bad.
            WidthMismatchError: ``idx_mapping`` is no int32 vector on the host.
        """
        requests = host_array("idx_mapping", idx_mapping, INT32, 1)
        num_reqs = self._padded_reqs(num_reqs_padded, len(requests))
        if self.layouts:
            self._rows.run(requests, requests, None)
        return self._engine.storage.block_tables(num_reqs)

    def compute_slot_mappings(
        self,
        idx_mapping: HostArray,
        query_start_loc: HostArray,
        positions: HostArray,
        num_tokens_padded: int,
    ) -> torch.Tensor:
        """Return the cache slot of every token in every group, [G, num_tokens_padded] int64.

        Args:
            idx_mapping: Row of each request, [N] int32 on the host; -1 is padding.
            query_start_loc: [N + 1] int32; the real tokens end at the last element.
            positions: Place of each token in its request, int64.
            num_tokens_padded: Slots to return; those past the real tokens are ``PAD_SLOT``.

        Raises:
            InvalidEditError: A row or the padded count is bad, or positions are missing.
            WidthMismatchError: A tensor's dtype, shape, stride or device is wrong.
        """
        requests = host_array("idx_mapping", idx_mapping, INT32, 1)
        int_between("the number of requests", len(requests), 0, self._max_reqs)
        num_tokens = self._padded_tokens(num_tokens_padded)
        tokens = read_tokens(
            query_start_loc, positions, len(requests), num_tokens, self._engine.device
        )
        if self.layouts:
            self._checks.requests(requests)
            self._rows.run(None, requests, tokens)
        return self._engine.storage.slot_mappings(num_tokens)

    def step(self, batch: StepBatch) -> StepTables:
        """Apply, gather and map in one copy and one launch.

        Raises:
            InvalidEditError: A row or a padded count is bad, or positions are missing.
            WidthMismatchError: A tensor's dtype, shape, stride or device is wrong.
        """
        idx_mapping, starts, positions, num_reqs, num_tokens = batch
        requests = host_array("idx_mapping", idx_mapping, INT32, 1)
        num_reqs = self._padded_reqs(num_reqs, len(requests))
        num_tokens = self._padded_tokens(num_tokens)
        tokens = read_tokens(starts, positions, len(requests), num_tokens, self._engine.device)
        if self.layouts:
            self._rows.run(requests, requests, tokens)
        storage = self._engine.storage
        return StepTables(storage.block_tables(num_reqs), storage.slot_mappings(num_tokens))

    def dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Return the tables of a batch of padding: the persistent views, all null.

        No row changes but those that are staged.

        Raises:
            InvalidEditError: ``num_reqs`` is no count or above the limit.
        """
        return self.gather_block_tables(_NO_REQUESTS, num_reqs)

    def dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        """Return the slots of a batch of padding: the persistent view, all ``PAD_SLOT``.

        Raises:
            InvalidEditError: ``num_tokens`` is no count or above the limit.
        """
        return self.compute_slot_mappings(
            _NO_REQUESTS, NO_TOKENS.starts, NO_TOKENS.positions, num_tokens
        )
