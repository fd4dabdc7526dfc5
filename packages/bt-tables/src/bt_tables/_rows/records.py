"""The state of every row, kept as the record that the row would send.

A row nobody edits keeps everything it holds: its record says ``keep`` all ``blocks``.
An edit changes the record, and after the launch what was is what is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import NoReturn

import numpy as np

from bt_width import BlockTableLayout, InvalidEditError, InvalidSpecError, RowOverflowError

from .._launch.arrays import INTP, UINT32, IntArray
from .._launch.wire import BATCH_ROW_AT, FIELDS_AT, NOWHERE, ROW_AT, RecordField, record_ints


class RowRecords:
    """One record a row.

    Attributes:
        num_rows: Rows (R).
        num_groups: Groups (G).
        ints: All records, [R, ints of a record] int32.
        base: The columns of that field, one a group; the others likewise.
        room: Blocks that a row has room for, by group, repeated for every row: [R, G].
        longest_row: The most blocks that a row of any group has room for.
    """

    def __init__(
        self, layouts: Sequence[BlockTableLayout], num_rows: int, num_blocks: Sequence[int] | None
    ) -> None:
        """Start with empty rows that no batch row mirrors.

        Raises:
            InvalidSpecError: ``num_blocks`` is not one pool size a group, with room for
                the null block.
        """
        self.layouts = tuple(layouts)
        self.num_rows = num_rows
        self.num_groups = groups = len(layouts)
        self.ints = np.zeros((num_rows, record_ints(groups)), np.int32)
        self.ints[:, ROW_AT] = np.arange(num_rows)
        self.ints[:, BATCH_ROW_AT] = NOWHERE
        # a record as one opaque element: scattered several times faster than as a line
        self._line = np.dtype((np.void, self.ints.itemsize * record_ints(groups)))
        self._lines = self.ints.view(self._line).reshape(-1)

        self.base = _columns(RecordField.BASE, groups)
        self.keep = _columns(RecordField.KEEP, groups)
        self.before = _columns(RecordField.BLOCKS_BEFORE, groups, fields=2)
        self.blocks_before = _columns(RecordField.BLOCKS_BEFORE, groups)
        self.nulled_before = _columns(RecordField.NULLED_BEFORE, groups)
        self.after = _columns(RecordField.BLOCKS, groups, fields=2)
        self.blocks = _columns(RecordField.BLOCKS, groups)
        self.nulled = _columns(RecordField.NULLED, groups)

        # where the columns of a settled record come from
        settled = np.arange(record_ints(groups))
        settled[self.keep] = settled[self.blocks]
        settled[self.before] = settled[self.after]
        self._settled = settled

        self.blocks_per_row = np.array([layout.blocks_per_row for layout in layouts], np.int32)
        self.room = np.tile(self.blocks_per_row, (num_rows, 1))
        self.longest_row = int(self.blocks_per_row.max(initial=0))
        self.max_ids = _max_ids(layouts, num_blocks)
        # an array, which is faster to compare with than a scalar
        self._max_id_of_all = np.array(self.max_ids.min(initial=2**31 - 1), np.uint32)

    def write(self, rows: IntArray, records: IntArray) -> None:
        """Replace the records of distinct ``rows``, [M] intp, by ``records``, contiguous."""
        self._lines[rows] = records.view(self._line).reshape(-1)

    def settle(self, rows: IntArray, records: IntArray) -> None:
        """What the launched ``records`` of ``rows`` say is now what the rows hold."""
        self.write(rows, records.take(self._settled, axis=1))

    def longest(self, edits: IntArray, copies: IntArray) -> int:
        """Return the most blocks that one of these records writes in a group."""
        longest = 0
        if len(edits):
            end = np.maximum(edits[:, self.blocks], edits[:, self.blocks_before])
            nulling = np.maximum(edits[:, self.nulled] - edits[:, self.nulled_before], 0)
            longest = int((end - edits[:, self.keep] + nulling).max())
        if len(copies):
            longest = max(longest, int(copies[:, self.blocks].max()))
            longest = max(longest, int(copies[:, self.blocks_before].max()))
        return longest

    def check_row(self, row: int) -> int:
        """Return ``row`` if the table has it.

        Raises:
            InvalidEditError: It has not.
        """
        if isinstance(row, (bool, float)) or not 0 <= row < self.num_rows:
            raise InvalidEditError(
                f"row {row} must be an int in 0..{self.num_rows - 1}",
                row=row,
                num_rows=self.num_rows,
            )
        return int(row)

    def check_requests(self, requests: IntArray) -> None:
        """Refuse a batch that names a row the table does not have.

        Raises:
            InvalidEditError: Naming the first.
        """
        bad = np.flatnonzero((requests < NOWHERE) | (requests >= self.num_rows))
        if bad.size:
            self.refuse_request(int(bad[0]), int(requests[bad[0]]))

    def refuse_request(self, request: int, row: int) -> NoReturn:
        """Say that a request of the batch names no row.

        Raises:
            InvalidEditError: Always.
        """
        raise InvalidEditError(
            f"idx_mapping[{request}] is {row}; it must be a row in 0..{self.num_rows - 1}, or "
            f"{NOWHERE} for padding",
            request=request,
            row=row,
            num_rows=self.num_rows,
        )

    def check_group(self, group: int) -> int:
        """Return ``group`` if there is one.

        Raises:
            InvalidEditError: There is none.
        """
        if isinstance(group, (bool, float)) or not 0 <= group < self.num_groups:
            raise InvalidEditError(
                f"group {group} must be an int in 0..{self.num_groups - 1}",
                group=group,
                num_groups=self.num_groups,
            )
        return int(group)

    def check_prefix(self, row: int, group: int, num_blocks: int) -> None:
        """Refuse to null more blocks than the row has.

        Raises:
            InvalidEditError: The row, the group or the count is none.
            RowOverflowError: ``num_blocks`` is more than the row has.
        """
        row, group = self.check_row(row), self.check_group(group)
        held = int(self.ints[row, self.blocks][group])
        if isinstance(num_blocks, (bool, float)) or num_blocks < 0:
            raise InvalidEditError(
                f"num_blocks must be a count, not {num_blocks}", num_blocks=num_blocks
            )
        if num_blocks > held:
            raise RowOverflowError(
                f"cannot null {num_blocks} blocks of row {row} in group {group}: it has {held}",
                row=row,
                group=group,
                num_blocks=num_blocks,
                held=held,
            )

    def check_ids(self, ids: IntArray, counts: IntArray) -> None:
        """Refuse a negative id and one that is past its group's pool.

        Args:
            ids: Flat: row by row, within a row group by group; int32 or int64.
            counts: Ids of each row and group, [M, G] or [G].

        Raises:
            InvalidEditError: Naming the first bad id.
        """
        if ids.dtype.itemsize == UINT32.itemsize:
            if not np.count_nonzero(ids.view(UINT32) > self._max_id_of_all):
                return
        elif not np.count_nonzero((ids < 0) | (ids > self._max_id_of_all)):
            return
        per_count = np.broadcast_to(self.max_ids, counts.shape).reshape(-1)
        limits = np.repeat(per_count, counts.reshape(-1))
        bad = np.flatnonzero((ids < 0) | (ids > limits))
        if bad.size:
            first = int(bad[0])
            raise InvalidEditError(
                f"block id {ids[first]} must lie in 0..{limits[first]}, the pool of its group",
                id=int(ids[first]),
                max_id=int(limits[first]),
            )

    def check_room(self, row: int, counts: IntArray, *, replace: bool) -> None:
        """Refuse more blocks than a row has room for.

        Raises:
            RowOverflowError: Naming the first group without room.
        """
        held = 0 if replace else self.ints[row, self.blocks]
        room = self.blocks_per_row - held
        if (counts > room).any():
            self.refuse_overflow(np.array([row]), counts[None], room[None])

    def refuse_rows(self, rows: IntArray) -> None:
        """Name the first of ``rows`` that the table does not have.

        Raises:
            InvalidEditError: Always, where there is one.
        """
        for row in rows[(rows < 0) | (rows >= self.num_rows)].tolist():
            self.check_row(row)

    def refuse_overflow(self, index: IntArray, counts: IntArray, room: IntArray) -> NoReturn:
        """Name the first row and group whose count is negative or more than its room.

        Args:
            index: Rows, [M].
            counts: Blocks they get, [M, G].
            room: Blocks there is room for, [M, G].

        Raises:
            InvalidEditError: A count is negative.
            RowOverflowError: None is.
        """
        bad, group = (int(place) for place in np.argwhere((counts < 0) | (counts > room))[0])
        row, gets = int(index[bad]), int(counts[bad, group])
        facts = {"row": row, "group": group, "num_blocks": gets}
        if gets < 0:
            raise InvalidEditError(
                f"row {row} gets {gets} blocks in group {group}; that is no count", **facts
            )
        layout = self.layouts[group]
        held = layout.blocks_per_row - int(room[bad, group])
        raise RowOverflowError(
            f"row {row} holds {held} blocks in group {group} and gets {gets} more; a row "
            f"holds at most {layout.blocks_per_row}: {layout.explain()}",
            **facts,
            held=held,
            blocks_per_row=layout.blocks_per_row,
        )


def _columns(field: RecordField, groups: int, *, fields: int = 1) -> slice:
    start = FIELDS_AT + field * groups
    return slice(start, start + fields * groups)


def _max_ids(layouts: Sequence[BlockTableLayout], num_blocks: Sequence[int] | None) -> IntArray:
    pools = list(repeat(2**31, len(layouts))) if num_blocks is None else list(num_blocks)
    if len(pools) != len(layouts) or any(pool < 1 for pool in pools):
        raise InvalidSpecError(
            f"num_blocks must be one pool size of at least 1 for each of {len(layouts)} groups, "
            f"not {num_blocks!r}",
            num_blocks=num_blocks,
        )
    limits = [
        min(pool - 1, layout.max_block_id) for pool, layout in zip(pools, layouts, strict=True)
    ]
    return np.array(limits, np.int64)


def as_index(rows: IntArray) -> IntArray:
    """Return int32 ``rows`` as indices; a negative one is far past any end."""
    return rows.view(UINT32).astype(INTP)
