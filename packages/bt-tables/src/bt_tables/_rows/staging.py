"""Edits of rows by index, folded to one record a row while they wait for a launch.

New ids go straight to the open packet. What a row that waits already gets more of is
copied behind the packet's end, so that its fresh ids lie in one run; the ids left
behind are dead and are sent all the same.
"""

from __future__ import annotations

import numpy as np

from bt_width import WidthMismatchError

from .._launch.arrays import INT32, INTP, UINT32, IntArray
from .._launch.ring import HostRing
from .checks import EditChecks
from .records import RowRecords
from .runs import run_places


class StagedEdits:
    """What waits for the next launch.

    Attributes:
        num_edits: Rows that wait.
        longest: At least the blocks that any waiting record writes.
    """

    def __init__(self, records: RowRecords, checks: EditChecks, ring: HostRing) -> None:
        """Wait for nothing yet."""
        self._records = records
        self._checks = checks
        self._ring = ring
        self._rows = np.zeros(records.num_rows, np.intp)
        self._ordinals = np.arange(1, records.num_rows + 1, dtype=np.int32)
        self.num_edits = 0
        self.longest = 0

    @property
    def rows(self) -> IntArray:
        """The rows that wait, in the order of their entries."""
        return self._rows[: self.num_edits]

    def clear(self) -> None:
        """Nothing waits any more."""
        self.num_edits = 0
        self.longest = 0

    def stage(self, rows: IntArray, counts: IntArray, ids: IntArray, *, overwrite: bool) -> None:
        """Give ``rows`` their ids, in order: all of them, or none and an error.

        Args:
            rows: [M] int32; a row may wait already, and may repeat.
            counts: [M, G] int32.
            ids: Flat int32: row by row, within a row group by group.
            overwrite: Replace what the rows hold.

        Raises:
            InvalidEditError: A row or an id is bad, or a count is negative.
            RowOverflowError: A row would hold more than it can.
            WidthMismatchError: The arrays do not go together.
        """
        records = self._records
        ends = self._check_shapes(rows, counts, ids)
        if not counts.size:
            return
        # a negative row is far past any end, and an index of it fails
        index = rows.view(UINT32).astype(INTP)
        try:
            found = records.ints.take(index, axis=0)
        except IndexError:
            self._checks.rows(rows)
            raise
        if self.num_edits + len(rows) > records.num_rows:
            self._stage_in_waves(index, counts, ids, ends, overwrite=overwrite)
            return
        room = records.room[: len(rows)]
        totals = counts
        if not overwrite:
            held = found[:, records.blocks]
            room = room - held
            totals = counts + held
        if np.count_nonzero(counts.view(UINT32) > room.view(UINT32)):
            self._checks.refuse_overflow(index, counts, room)
        self._checks.ids(ids, counts)
        if not self._register_new(index):
            self._stage_in_waves(index, counts, ids, ends, overwrite=overwrite)
            return
        ends += self._ring.put(ids)
        found[:, records.base] = ends.reshape(totals.shape) - totals
        found[:, records.blocks] = totals
        if overwrite:
            found[:, records.keep] = 0
            found[:, records.nulled] = 0
            self.longest = records.longest_row
        records.write(index, found)
        self.longest = max(self.longest, len(ids))

    def null_prefix(self, row: int, group: int, num_blocks: int) -> None:
        """Null the first ``num_blocks`` blocks of a row, in total; the count was checked."""
        nulled = self._records.ints[row, self._records.nulled]
        if num_blocks > nulled[group]:
            self._register(np.array([row]))
            nulled[group] = num_blocks
            self.longest = self._records.longest_row

    def _check_shapes(self, rows: IntArray, counts: IntArray, ids: IntArray) -> IntArray:
        """Return where the ids of each row and group end, flat."""
        if counts.shape != (len(rows), self._records.num_groups):
            raise WidthMismatchError(
                f"counts must be [{len(rows)}, {self._records.num_groups}], "
                f"not {list(counts.shape)}",
                shape=counts.shape,
            )
        # int32 as the counts: a sum that leaves it has a count that no row has room for
        ends: IntArray = np.add.accumulate(counts.reshape(-1), 0, INT32)
        num_ids = ends[-1] if ends.size else 0
        if num_ids != len(ids):
            raise WidthMismatchError(
                f"counts add up to {num_ids}; there are {len(ids)} ids",
                counted=int(num_ids),
                num_ids=len(ids),
            )
        return ends

    def _register_new(self, index: IntArray) -> bool:
        """Let rows wait; return False and change nothing if one waits already or repeats."""
        edit_of_row = self._ring.open().edit_of_row
        first, end = self.num_edits, self.num_edits + len(index)
        edit_of_row[index] = self._ordinals[first:end]
        if np.count_nonzero(edit_of_row) != end:
            edit_of_row.fill(0)
            edit_of_row[self.rows] = self._ordinals[:first]
            return False
        self._rows[first:end] = index
        self.num_edits = end
        return True

    def _register(self, index: IntArray) -> None:
        """Let distinct rows wait, those that do not yet."""
        edit_of_row = self._ring.open().edit_of_row
        new = index[edit_of_row[index] == 0]
        first, end = self.num_edits, self.num_edits + len(new)
        edit_of_row[new] = self._ordinals[first:end]
        self._rows[first:end] = new
        self.num_edits = end

    def _stage_in_waves(
        self, index: IntArray, counts: IntArray, ids: IntArray, ends: IntArray, *, overwrite: bool
    ) -> None:
        """Stage rows that wait or repeat: first every row's first edit, then its second."""
        records = self._records
        totals = counts.astype(np.int64)
        if not overwrite:
            summed = np.zeros((records.num_rows, records.num_groups), np.int64)
            np.add.at(summed, index, totals)
            totals = summed[index] + records.ints[index][:, records.blocks]
        if ((counts < 0) | (totals > records.blocks_per_row)).any():
            self._checks.refuse_overflow(index, counts, records.blocks_per_row - (totals - counts))
        self._checks.ids(ids, counts)
        starts = (ends - counts.reshape(-1)).reshape(counts.shape) + self._ring.put(ids)
        left = np.arange(len(index))
        while left.size:
            firsts = np.unique(index[left], return_index=True)[1]
            wave = left[firsts]
            self._stage_wave(index[wave], counts[wave], starts[wave], overwrite=overwrite)
            left = np.delete(left, firsts)
        self.longest = records.longest_row

    def _stage_wave(
        self, index: IntArray, counts: IntArray, starts: IntArray, *, overwrite: bool
    ) -> None:
        """Stage distinct rows whose new ids start at ``starts`` in the packet, [M, G]."""
        records = self._records
        found = records.ints.take(index, axis=0)
        if overwrite:
            found[:, records.keep] = 0
            found[:, records.nulled] = 0
            found[:, records.blocks] = counts
            found[:, records.base] = starts
        else:
            keep, blocks = found[:, records.keep], found[:, records.blocks]
            runs = np.stack((found[:, records.base] + keep, starts), axis=-1)
            lengths = np.stack((blocks - keep, counts), axis=-1)
            found[:, records.base] = self._join(runs, lengths) - keep
            found[:, records.blocks] = blocks + counts
        self._register(index)
        records.write(index, found)

    def _join(self, runs: IntArray, lengths: IntArray) -> IntArray:
        """Copy runs of ids behind what the packet holds; return where each pair starts, [M, G].

        Args:
            runs: Where the two runs of a row and group start, [M, G, 2].
            lengths: How long they are, [M, G, 2].
        """
        sources, starts = run_places(runs, lengths)
        at = self._ring.put(self._ring.open().ints[sources])
        return at + starts[..., 0]
