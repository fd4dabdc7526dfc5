"""What is refused before anything is staged: bad rows, groups, ids, counts, full rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from bt_width import BlockTableLayout, InvalidEditError, InvalidSpecError, RowOverflowError

from .._launch.arrays import UINT32, IntArray, int_between
from .._launch.wire import NOWHERE

_MAX_ID = 2**31 - 1


class EditChecks:
    """Checks of what edits and batches name; they change nothing.

    Attributes:
        blocks_per_row: Blocks that a row of each group has room for, [G] int32.
    """

    def __init__(
        self,
        layouts: Sequence[BlockTableLayout],
        max_num_reqs: int,
        num_blocks: Sequence[int] | None,
    ) -> None:
        """Check against these plans and pools.

        Raises:
            InvalidSpecError: ``num_blocks`` is not one pool size a group, with room for
                the null block.
        """
        self._layouts = tuple(layouts)
        self._max_row = max_num_reqs - 1
        self.blocks_per_row = np.array([layout.blocks_per_row for layout in layouts], np.int32)
        self._max_ids = _max_ids(self._layouts, num_blocks)
        # an array, which is faster to compare with than a scalar
        self._max_id_of_all = np.array(self._max_ids.min(initial=_MAX_ID), np.uint32)

    def row(self, row: int) -> int:
        """Return ``row`` if the table has it.

        Raises:
            InvalidEditError: It has not.
        """
        return int_between("row", row, 0, self._max_row)

    def group(self, group: int) -> int:
        """Return ``group`` if there is one.

        Raises:
            InvalidEditError: There is none.
        """
        return int_between("group", group, 0, len(self._layouts) - 1)

    def rows(self, rows: IntArray) -> None:
        """Refuse rows that the table does not have.

        Raises:
            InvalidEditError: Naming the first.
        """
        for row in rows[(rows < 0) | (rows > self._max_row)].tolist():
            self.row(row)

    def requests(self, requests: IntArray) -> None:
        """Refuse a batch that names a row the table does not have.

        Raises:
            InvalidEditError: Naming the first.
        """
        bad = np.flatnonzero((requests < NOWHERE) | (requests > self._max_row))
        if bad.size:
            request, row = int(bad[0]), int(requests[bad[0]])
            raise InvalidEditError(
                f"idx_mapping[{request}] is {row}; it must be a row in 0..{self._max_row}, or "
                f"{NOWHERE} for padding",
                request=request,
                row=row,
                max_row=self._max_row,
            )

    def prefix(self, row: int, group: int, num_blocks: int, held: int) -> int:
        """Return ``num_blocks`` if a row that holds ``held`` blocks has as many to null.

        Raises:
            InvalidEditError: It is no count.
            RowOverflowError: It is more than the row has.
        """
        count = int_between("num_blocks", num_blocks, 0, _MAX_ID)
        if count > held:
            raise RowOverflowError(
                f"cannot null {count} blocks of row {row} in group {group}: it has {held}",
                row=row,
                group=group,
                num_blocks=count,
                held=held,
            )
        return count

    def ids(self, ids: IntArray, counts: IntArray) -> None:
        """Refuse a negative id and one that is past its group's pool.

        Args:
            ids: Flat: row by row, within a row group by group; int32 or int64.
            counts: Ids of each row and group, [M, G] or [G].

        Raises:
            InvalidEditError: Naming the first bad id.
        """
        if ids.dtype.itemsize == UINT32.itemsize:
            # a negative int32 is a large uint32
            if not np.count_nonzero(ids.view(UINT32) > self._max_id_of_all):
                return
        elif not np.count_nonzero((ids < 0) | (ids > self._max_id_of_all)):
            return
        of_count = np.broadcast_to(self._max_ids, counts.shape).reshape(-1)
        max_ids = np.repeat(of_count, counts.reshape(-1))
        bad = np.flatnonzero((ids < 0) | (ids > max_ids))
        if bad.size:
            first = int(bad[0])
            raise InvalidEditError(
                f"block id {ids[first]} must lie in 0..{max_ids[first]}, the pool of its group",
                id=int(ids[first]),
                max_id=int(max_ids[first]),
            )

    def room(self, row: int, counts: IntArray, held: IntArray | int) -> None:
        """Refuse more blocks than a row has room for behind those it holds.

        Raises:
            RowOverflowError: Naming the first group without room.
        """
        room = self.blocks_per_row - held
        if (counts > room).any():
            self.refuse_overflow(np.array([row]), counts[None], room[None])

    def refuse_overflow(self, index: IntArray, counts: IntArray, room: IntArray) -> NoReturn:
        """Name the first row and group whose count is negative or more than its room.

        Args:
            index: Rows, [M].
            counts: Blocks they get, [M, G].
            room: Blocks there is room for, [M, G].

        Raises:
            InvalidEditError: That count is negative.
            RowOverflowError: It is not.
        """
        bad, group = (int(place) for place in np.argwhere((counts < 0) | (counts > room))[0])
        row, gets = int(index[bad]), int(counts[bad, group])
        facts = {"row": row, "group": group, "num_blocks": gets}
        if gets < 0:
            raise InvalidEditError(
                f"row {row} gets {gets} blocks in group {group}; that is no count", **facts
            )
        layout = self._layouts[group]
        held = layout.blocks_per_row - int(room[bad, group])
        raise RowOverflowError(
            f"row {row} holds {held} blocks in group {group} and gets {gets} more; a row "
            f"holds at most {layout.blocks_per_row}: {layout.explain()}",
            **facts,
            held=held,
            blocks_per_row=layout.blocks_per_row,
        )


def _max_ids(layouts: Sequence[BlockTableLayout], num_blocks: Sequence[int] | None) -> IntArray:
    if num_blocks is None:
        return np.array([layout.max_block_id for layout in layouts], np.int64)
    try:
        pools = list(num_blocks)
    except TypeError:
        pools = []
    if len(pools) != len(layouts) or any(type(pool) is not int or pool < 1 for pool in pools):
        raise InvalidSpecError(
            f"num_blocks must be one pool size of at least 1 for each of {len(layouts)} groups, "
            f"not {num_blocks!r}",
            num_blocks=num_blocks,
        )
    limits = [
        min(pool - 1, layout.max_block_id) for pool, layout in zip(pools, layouts, strict=True)
    ]
    return np.array(limits, np.int64)
