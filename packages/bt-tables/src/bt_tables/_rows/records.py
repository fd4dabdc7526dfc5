"""The state of every row, kept as the record that the row would send.

A row nobody edits keeps everything it holds: its record says ``keep`` all ``blocks``.
An edit changes the record, and after the launch what was is what is.
"""

from __future__ import annotations

import numpy as np

from .._launch.arrays import IntArray
from .._launch.wire import BATCH_ROW_AT, FIELDS_AT, NOWHERE, ROW_AT, RecordField, record_ints


class RowRecords:
    """One record a row.

    Attributes:
        num_rows: Rows (R).
        num_groups: Groups (G).
        ints: All records, [R, ints of a record] int32.
        base, keep, blocks_before, nulled_before, blocks, nulled: The columns of each
            ``RecordField``, one a group.
        before: The columns of ``blocks_before`` and ``nulled_before``.
        after: The columns of ``blocks`` and ``nulled``.
        blocks_per_row: Blocks that a row of each group has room for, [G].
        room: Blocks that a row has room for, by group, repeated for every row: [R, G].
        longest_row: The most blocks that a row of any group has room for.
    """

    def __init__(self, num_rows: int, blocks_per_row: IntArray) -> None:
        """Start with empty rows that no batch row mirrors."""
        self.num_rows = num_rows
        self.num_groups = groups = len(blocks_per_row)
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

        self.blocks_per_row = blocks_per_row
        self.room = np.tile(blocks_per_row, (num_rows, 1))
        self.longest_row = int(blocks_per_row.max(initial=0))

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


def _columns(field: RecordField, groups: int, *, fields: int = 1) -> slice:
    start = FIELDS_AT + field * groups
    return slice(start, start + fields * groups)
