"""Rows in batch order: edited on the host, committed to the device, what changed alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._launch.arrays import HostArray, IntArray, flatten_ids, int_between
from ._launch.tokens import read_tokens, vector_length
from ._rows.host_rows import HostRows
from .base import BlockTables


class MultiGroupBlockTable(BlockTables):
    """Block tables whose rows are the batch, in its order.

    Rows are edited on the host, where nothing of it is visible; ``commit`` sends what
    changed since the last one, in one copy and one launch for all groups. The tables
    that ``block_table`` returns are persistent and read-only, and stay true until the
    next ``commit``.

    A call that raises has changed nothing, for any group.
    """

    _rows_are_batch = True
    _rows: HostRows

    def _make_rows(self) -> HostRows:
        return HostRows(self._engine, self._records)

    def append_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        """Give a row more blocks.

        Args:
            block_ids: One sequence of block ids a group.
            row: The row.

        Raises:
            InvalidEditError: The row or an id is bad, or a group has no sequence.
            RowOverflowError: The row would hold more than it can.
        """
        row, counts, ids = self._checked(row, block_ids, replace=False)
        if self.layouts:
            self._rows.append(row, counts, ids)

    def add_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        """Replace what a row holds; arguments and errors are those of ``append_row``."""
        row, counts, ids = self._checked(row, block_ids, replace=True)
        if self.layouts:
            self._rows.clear(row)
            self._rows.append(row, counts, ids)

    def clear_row(self, row: int) -> None:
        """Take all blocks from a row.

        Raises:
            InvalidEditError: There is no such row.
        """
        row = self._checks.row(row)
        if self.layouts:
            self._rows.clear(row)

    def move_row(self, src: int, dst: int) -> None:
        """Put row ``src`` in the place of ``dst``, whose blocks are gone; ``src`` is empty then.

        Raises:
            InvalidEditError: There is no such row.
        """
        src, dst = self._checks.row(src), self._checks.row(dst)
        if self.layouts:
            self._rows.move(src, dst)

    def swap_rows(self, a: int, b: int) -> None:
        """Exchange two rows.

        Raises:
            InvalidEditError: There is no such row.
        """
        a, b = self._checks.row(a), self._checks.row(b)
        if self.layouts:
            self._rows.swap(a, b)

    def commit(self, num_reqs: int) -> None:
        """Send what changed in the first ``num_reqs`` rows; those above are null then.

        Rows above keep their blocks on the host, and are sent again when the batch grows.

        Raises:
            InvalidEditError: ``num_reqs`` is no count or above the limit.
        """
        num_reqs = int_between("num_reqs", num_reqs, 0, self._max_reqs)
        if self.layouts:
            self._rows.commit(num_reqs)

    def block_table(self, group: int) -> torch.Tensor:
        """Return a group's persistent [max_num_reqs, W] table, int32.

        Raises:
            InvalidEditError: There is no such group.
        """
        group = self._checks.group(group)
        return self._engine.storage.block_tables(self._records.num_rows)[group]

    def compute_slot_mappings(
        self, query_start_loc: HostArray, positions: HostArray, num_tokens_padded: int
    ) -> torch.Tensor:
        """Return the cache slot of every token in every group, [G, num_tokens_padded] int64.

        Request n is row n, as last committed.

        Args:
            query_start_loc: [N + 1] int32; the real tokens end at the last element.
            positions: Place of each token in its request, int64.
            num_tokens_padded: Slots to return; those past the real tokens are ``PAD_SLOT``.

        Raises:
            InvalidEditError: There are more requests than rows, the padded count is bad,
                or positions are missing.
            WidthMismatchError: A tensor's dtype, shape, stride or device is wrong.
        """
        num_reqs = int_between(
            "the number of requests", vector_length(query_start_loc) - 1, 0, self._max_reqs
        )
        num_tokens = self._padded_tokens(num_tokens_padded)
        device = self._engine.device
        tokens = read_tokens(query_start_loc, positions, num_reqs, num_tokens, device)
        if self.layouts:
            self._rows.map_tokens(num_reqs, tokens)
        return self._engine.storage.slot_mappings(num_tokens)

    def _checked(
        self, row: int, block_ids: Sequence[Sequence[int]], *, replace: bool
    ) -> tuple[int, IntArray, IntArray]:
        """Return the row, the ids of each group and all ids, flat."""
        counts, ids = flatten_ids(block_ids, len(self.layouts))
        row = self._checks.row(row)
        held = 0 if replace or not self.layouts else self._records.ints[row, self._records.blocks]
        self._checks.room(row, counts, held)
        self._checks.ids(ids, counts)
        return row, counts, ids
