"""Rows by request index that live on the device; edits are staged and expanded there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ._checks import INT32, NO_TOKENS, HostArray, host_array
from .base import BlockTables

_NO_REQUESTS = np.empty(0, np.int32)


class StepBatch(NamedTuple):
    """The batch of a step.

    Attributes:
        idx_mapping: Row of each request, [N] int32 on the host; -1 is padding.
        query_start_loc: First token of each request and the end of the last, [N + 1]
            int32, on the host or the device; it begins with 0 and never falls, and may be
            padded with its end.
        positions: Place of each token in its request, int64, on the host or the device.
        num_reqs_padded: Rows of the returned tables.
        num_tokens_padded: Slots of the returned mappings.
    """

    idx_mapping: HostArray
    query_start_loc: HostArray
    positions: HostArray
    num_reqs_padded: int
    num_tokens_padded: int


class StepTables(NamedTuple):
    """What a step left on the device, in views of storage that never moves.

    Attributes:
        block_tables: Of each group, [num_reqs_padded, W] int32.
        slot_mappings: [G, num_tokens_padded] int64.
    """

    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: torch.Tensor


class StagedBlockTables(BlockTables):
    """Block tables whose rows belong to requests, whatever their place in the batch.

    Edits are checked and staged on the host, where nothing of them is visible. The next
    call that launches carries out all that is staged, whichever it is: ``step`` in a
    serving loop; ``apply_staged_writes``, ``gather_block_tables`` and
    ``compute_slot_mappings`` are parts of it. What such a call returns is read-only and
    stays true until the next one: a batch row that holds its request's whole row is
    extended in place.

    A call that raises has staged nothing, for any group, also where a signal interrupted
    it: an edit is there as a whole or not at all, and a launch that did not end is made
    anew by the next one.

    One table belongs to one thread at a time: calls from two threads need a lock around
    them. Tables of different threads have nothing in common.
    """

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
        row = self._checks.row(row)
        self._rows.append(row, block_ids, replace=bool(overwrite), named=row)

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
        self._stage(rows, counts, ids, overwrite=overwrite)

    def clear_row(self, row: int) -> None:
        """Take all blocks from a row.

        Raises:
            InvalidEditError: ``row`` is not in 0..max_num_reqs - 1.
        """
        row = self._checks.row(row)
        self._rows.append(row, ((),) * len(self.layouts), replace=True, named=row)

    def null_prefix(self, row: int, group: int, num_blocks: int) -> None:
        """Null a row's first blocks until it is replaced or cleared.

        Args:
            row: The row.
            group: The cache group.
            num_blocks: Blocks from the start of the row, in total; fewer than an earlier
                call said change nothing.

        Raises:
            InvalidEditError: The row, the group or the count is out of its range.
            RowOverflowError: The row holds fewer blocks (``num_blocks`` says how many).
        """
        row, group = self._checks.row(row), self._checks.group(group)
        self._rows.null_prefix(row, group, num_blocks, named=row)

    def num_blocks(self, row: int, group: int) -> int:
        """Return how many blocks a row holds in a group, staged and null ones included.

        Raises:
            InvalidEditError: The row or the group is out of its range.
        """
        row, group = self._checks.row(row), self._checks.group(group)
        return self._rows.held(row)[group]

    def rows(self, group: int) -> torch.Tensor:
        """Return all rows of a group as the device holds them, [max_num_reqs, W] int32.

        For debugging: a read-only view that disturbs neither the batch nor what is staged,
        of which it shows nothing before a launch.

        Raises:
            InvalidEditError: ``group`` is out of its range.
        """
        return self._storage.table(self._storage.rows, self._checks.group(group))

    def apply_staged_writes(self) -> None:
        """Carry out what is staged, in rows and in the batch rows that mirror them."""
        self._rows.launch(None, _NO_REQUESTS, None)

    def gather_block_tables(
        self, idx_mapping: HostArray, num_reqs_padded: int
    ) -> tuple[torch.Tensor, ...]:
        """Return one [num_reqs_padded, W] table a group, in batch order.

        Args:
            idx_mapping: Row of each request, [N] int32 on the host; -1 is padding.
            num_reqs_padded: Rows to return; those from N on are null.

        Raises:
            InvalidEditError: A row or the padded count is bad.
            WidthMismatchError: ``idx_mapping`` is not an int32 vector on the host.
        """
        requests = host_array("idx_mapping", idx_mapping, INT32, 1)
        num_reqs = self._checks.num_reqs("num_reqs_padded", num_reqs_padded, len(requests))
        self._rows.launch(requests, requests, None)
        return self._storage.block_tables(num_reqs)

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
            query_start_loc: [N + 1] int32; the real tokens end at the last element. It begins
                with 0 and never falls, and may be padded with its end.
            positions: Place of each token in its request, int64.
            num_tokens_padded: Slots to return; those past the real tokens are ``PAD_SLOT``.

        Raises:
            InvalidEditError: A row, a start or the padded count is bad, or positions are
                missing.
            WidthMismatchError: A tensor's dtype, shape, stride or device is wrong.
        """
        requests = host_array("idx_mapping", idx_mapping, INT32, 1)
        self._checks.num_reqs("the number of requests", len(requests))
        num_tokens = self._checks.num_tokens("num_tokens_padded", num_tokens_padded)
        tokens = self._checks.tokens(
            query_start_loc, positions, len(requests), num_tokens, self.device
        )
        self._checks.requests(requests)
        self._rows.launch(None, requests, tokens)
        return self._storage.slot_mappings(num_tokens)

    def step(self, batch: StepBatch) -> StepTables:
        """Apply, gather and map in one copy and one launch.

        Raises:
            InvalidEditError: A row, a start or a padded count is bad, or positions are
                missing.
            WidthMismatchError: A tensor's dtype, shape, stride or device is wrong.
        """
        idx_mapping, starts, positions, num_reqs, num_tokens = batch
        requests = host_array("idx_mapping", idx_mapping, INT32, 1)
        num_reqs = self._checks.num_reqs("num_reqs_padded", num_reqs, len(requests))
        num_tokens = self._checks.num_tokens("num_tokens_padded", num_tokens)
        tokens = self._checks.tokens(starts, positions, len(requests), num_tokens, self.device)
        self._rows.launch(requests, requests, tokens)
        storage = self._storage
        return StepTables(storage.block_tables(num_reqs), storage.slot_mappings(num_tokens))

    def dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Return the tables of a batch of padding: the persistent views, all null.

        No row changes but those that are staged.

        Raises:
            InvalidEditError: ``num_reqs`` is not a count or above the limit.
        """
        num_reqs = self._checks.num_reqs("num_reqs", num_reqs)
        self._rows.launch(_NO_REQUESTS, _NO_REQUESTS, None)
        return self._storage.block_tables(num_reqs)

    def dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        """Return the slots of a batch of padding: the persistent view, all ``PAD_SLOT``.

        Raises:
            InvalidEditError: ``num_tokens`` is not a count or above the limit.
        """
        num_tokens = self._checks.num_tokens("num_tokens", num_tokens)
        self._rows.launch(None, _NO_REQUESTS, NO_TOKENS)
        return self._storage.slot_mappings(num_tokens)
