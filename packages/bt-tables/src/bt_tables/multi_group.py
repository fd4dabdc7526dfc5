"""Rows in batch order: edited on the host, committed to the device, what changed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bt_width import BlockTableLayout

from ._launch.arrays import HostArray, IntArray, flatten_ids, int_between
from ._launch.engine import NO_ENTRIES, NO_RECORDS, Entries
from ._launch.executor import Executor
from ._launch.tokens import Tokens, read_tokens, vector_length
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

    def __init__(
        self,
        layouts: Sequence[BlockTableLayout],
        *,
        device: str | torch.device | Executor,
        num_blocks: Sequence[int] | None = None,
        max_steps_in_flight: int = 2,
    ) -> None:
        """Allocate empty tables.

        Args:
            layouts: One plan a group, all of the same limits.
            device: Where the tables lie.
            num_blocks: The pool of each group, block 0 included; without it only ids
                whose kernel-block ids leave int32 are refused.
            max_steps_in_flight: Steps, of a commit and its slots each, whose packets may wait
                to be read by the device.

        Raises:
            InvalidSpecError: An argument is no such number, or the layouts are planned
                for different limits.
        """
        super().__init__(
            layouts,
            device,
            num_blocks=num_blocks,
            max_steps_in_flight=max_steps_in_flight,
            rows_are_batch=True,
        )
        self._rows = HostRows(self._records, self._engine.ring)
        self._batch_order = np.arange(self._records.num_rows, dtype=np.int32)

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

    def null_prefix(self, row: int, group: int, num_blocks: int) -> None:
        """Null a row's first blocks until it is replaced or cleared.

        Args:
            row: The row.
            group: The cache group.
            num_blocks: Blocks from the start of the row, in total: never fewer than an
                earlier call said.

        Raises:
            InvalidEditError: The row, the group or the count is none.
            RowOverflowError: The row has fewer blocks.
        """
        row, group = self._checks.row(row), self._checks.group(group)
        held = int(self._records.ints[row, self._records.blocks][group])
        self._rows.null_prefix(row, group, self._checks.prefix(row, group, num_blocks, held))

    def commit(self, num_reqs: int) -> None:
        """Send what changed in the first ``num_reqs`` rows; those above are null then.

        Rows above keep their blocks on the host, and are sent again when the batch grows.

        Raises:
            InvalidEditError: ``num_reqs`` is no count or above the limit.
        """
        num_reqs = int_between("num_reqs", num_reqs, 0, self._max_reqs)
        if not self.layouts:
            return
        rows, edits = self._rows.changes(num_reqs)
        self._run(
            Entries(edits, NO_RECORDS, self._records.longest_row), self._batch_order[:0], None
        )
        self._rows.settle(rows, edits, num_reqs)

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
            self._run(NO_ENTRIES, self._batch_order[:num_reqs], tokens)
        return self._engine.storage.slot_mappings(num_tokens)

    def invalidate(self) -> None:
        """Send every row whole at the next commit, and write every slot anew.

        For when somebody else wrote to what a call returned, or a launch failed.
        """
        self._rows.forget_device()
        self._engine.forget_slots()

    def rebind(self) -> None:
        """Make the tables whole after their memory was released and mapped again.

        The layout facts are written anew; rows come back from the host at the next commit.
        """
        self._engine.storage.fill_groups()
        self.invalidate()

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

    def _run(self, entries: Entries, requests: IntArray, tokens: Tokens | None) -> None:
        try:
            self._engine.run(entries, requests, tokens)
        except BaseException:
            self._engine.await_packet()
            self.invalidate()
            raise
