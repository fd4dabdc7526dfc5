"""Rows in batch order: a permutation kept on the host over rows that live on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bt_width import BlockTableLayout

from ._checks import INT32, HostArray, vector
from ._packet import IntArray
from .base import BlockTables
from .devices import Executor

_NO_REQUESTS = np.empty(0, np.int32)


class MultiGroupBlockTable(BlockTables):
    """Block tables whose rows are the batch, in its order.

    Rows are edited on the host, where nothing of it is visible; ``commit`` sends what
    changed since the last one, in one copy and one launch for all groups. The tables
    that ``block_table`` returns are persistent and read-only, and stay true until the
    next ``commit``.

    A row keeps its blocks on the device, wherever it stands in the batch: ``swap_rows``
    exchanges two ints on the host, and a moved row is copied on the device, so that no id
    is sent twice.

    A call that raises has changed nothing, for any group, also where a signal interrupted
    it: an edit is there as a whole or not at all, and a launch that did not end is made
    anew by the next ``commit``. Until then slots are padding.

    One table belongs to one thread at a time: calls from two threads need a lock around
    them. Tables of different threads have nothing in common.
    """

    # a commit, and the slots
    _launches_a_step = 2

    def __init__(
        self,
        layouts: Sequence[BlockTableLayout],
        *,
        device: str | torch.device | Executor,
        num_blocks: Sequence[int] | None = None,
        max_steps_in_flight: int = 2,
    ) -> None:
        """Allocate empty tables; arguments and errors are those of ``StagedBlockTables``."""
        super().__init__(
            layouts, device=device, num_blocks=num_blocks, max_steps_in_flight=max_steps_in_flight
        )
        # replaced as a whole, so that an interruption leaves the one or the other
        self._order = np.arange(self._storage.num_rows, dtype=np.int32)

    def append_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        """Give a row more blocks.

        Args:
            block_ids: One sequence of block ids a group.
            row: The row.

        Raises:
            InvalidEditError: The row or an id is bad, or a group has no sequence.
            RowOverflowError: The row would hold more than it can.
        """
        row = self._checks.row(row)
        self._rows.append(self._place(row), block_ids, replace=False, named=row)

    def add_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        """Replace what a row holds; arguments and errors are those of ``append_row``."""
        row = self._checks.row(row)
        self._rows.append(self._place(row), block_ids, replace=True, named=row)

    def append_rows(
        self, rows: HostArray, counts: HostArray, ids: HostArray, *, overwrite: bool = False
    ) -> None:
        """Give many rows more blocks at once; a row may repeat, and edits apply in order.

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
        self._rows.finish()
        self._stage(rows, counts, ids, overwrite=overwrite, order=self._order)

    def clear_row(self, row: int) -> None:
        """Take all blocks from a row.

        Raises:
            InvalidEditError: ``row`` is not in 0..max_num_reqs - 1.
        """
        self.add_row(((),) * len(self.layouts), row)

    def move_row(self, src: int, dst: int) -> None:
        """Put row ``src`` in the place of ``dst``, whose blocks are gone; ``src`` is empty then.

        Raises:
            InvalidEditError: A row is not in 0..max_num_reqs - 1.
        """
        src, dst = self._checks.row(src, "src"), self._checks.row(dst, "dst")
        if src == dst:
            return
        order, emptied = self._swapped(src, dst), self._place(dst)

        def move() -> None:
            self._rows.cleared(emptied)
            self._order = order

        self._rows.change(move)

    def swap_rows(self, a: int, b: int) -> None:
        """Exchange two rows.

        Raises:
            InvalidEditError: A row is not in 0..max_num_reqs - 1.
        """
        self._order = self._swapped(self._checks.row(a, "a"), self._checks.row(b, "b"))

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
        self._rows.null_prefix(self._place(row), group, num_blocks, named=row)

    def num_blocks(self, row: int, group: int) -> int:
        """Return how many blocks a row holds in a group, uncommitted and null ones included.

        Raises:
            InvalidEditError: The row or the group is out of its range.
        """
        row, group = self._checks.row(row), self._checks.group(group)
        return self._rows.held(self._place(row))[group]

    def rows(self, group: int) -> torch.Tensor:
        """Return all rows of a group as the device holds them, [max_num_reqs, W] int32.

        For debugging: a copy in the order of the rows, those above the last commit
        included. It disturbs nothing and shows no edit before it is committed.

        Raises:
            InvalidEditError: ``group`` is out of its range.
        """
        table = self._storage.table(self._storage.rows, self._checks.group(group))
        self._rows.finish()
        return table[torch.from_numpy(self._order).to(self.device, torch.int64)]

    def commit(self, num_reqs: int) -> None:
        """Send what changed in the first ``num_reqs`` rows; those above are null then.

        Rows above keep their blocks, and are shown again when the batch grows.

        Raises:
            InvalidEditError: ``num_reqs`` is not a count or above the limit.
        """
        num_reqs = self._checks.num_reqs("num_reqs", num_reqs)
        self._rows.finish()
        self._rows.launch(self._order[:num_reqs], _NO_REQUESTS, None)

    def block_table(self, group: int) -> torch.Tensor:
        """Return a group's persistent [max_num_reqs, W] table, int32.

        Raises:
            InvalidEditError: ``group`` is out of its range.
        """
        return self._storage.block_tables(self._storage.num_rows)[self._checks.group(group)]

    def compute_slot_mappings(
        self, query_start_loc: HostArray, positions: HostArray, num_tokens_padded: int
    ) -> torch.Tensor:
        """Return the cache slot of every token in every group, [G, num_tokens_padded] int64.

        Request n is row n, as last committed.

        Args:
            query_start_loc: [N + 1] int32; the real tokens end at the last element. It begins
                with 0 and never falls.
            positions: Place of each token in its request, int64.
            num_tokens_padded: Slots to return; those past the real tokens are ``PAD_SLOT``.

        Raises:
            InvalidEditError: There are more requests than rows, a start or the padded count
                is bad, or positions are missing.
            WidthMismatchError: A tensor's dtype, shape, stride or device is wrong.
        """
        starts = vector("query_start_loc", query_start_loc, INT32, self.device)
        num_reqs = self._checks.num_reqs("the number of requests", max(len(starts) - 1, 0))
        num_tokens = self._checks.num_tokens("num_tokens_padded", num_tokens_padded)
        tokens = self._checks.tokens(starts, positions, num_reqs, num_tokens, self.device)
        committed = self._rows.requests[:num_reqs]
        requests = np.full(num_reqs, -1, np.int32)
        requests[: len(committed)] = committed
        self._rows.launch(None, requests, tokens, with_edits=False)
        return self._storage.slot_mappings(num_tokens)

    def _place(self, row: int) -> int:
        """Return where on the device a row lies."""
        if self._rows.pending is not None:
            self._rows.finish()
        return self._order.item(row)

    def _swapped(self, a: int, b: int) -> IntArray:
        self._rows.finish()
        order = self._order.copy()
        order[a], order[b] = self._order[b], self._order[a]
        return order
