"""Which row each batch row holds: what has to be copied when the batch changes.

A batch row that holds all of a row and is extended with it *mirrors* it; a row is
mirrored at most once. Every other batch row is null, or stale and written whole.
"""

from __future__ import annotations

import numpy as np

from .._launch.arrays import IntArray
from .._launch.wire import BATCH_ROW_AT, FIELDS_AT, NOWHERE, ROW_AT
from .checks import EditChecks
from .records import RowRecords

_NULL = NOWHERE
_STALE = -2


class BatchMirror:
    """What the batch rows hold on the device."""

    def __init__(self, records: RowRecords, checks: EditChecks) -> None:
        """All batch rows are null."""
        self._records = records
        self._checks = checks
        self._row_of = np.full(records.num_rows, _NULL, np.int64)
        # what a stale batch row may hold, in blocks
        self._filled = np.zeros((records.num_rows, records.num_groups), np.int32)
        self._num_used = 0
        self._current: bytes | None = b""
        self._requests = np.empty(0, np.int32)
        self._has_repeats = False
        self._changed = np.empty(0, np.int64)
        self._wanted = np.empty(0, np.int64)

    def forget(self) -> None:
        """Any batch row may hold anything from now on."""
        mirrored = self._row_of[self._row_of >= 0]
        self._records.ints[mirrored, BATCH_ROW_AT] = NOWHERE
        self._row_of.fill(_STALE)
        self._filled[:] = self._records.blocks_per_row
        self._num_used = self._records.num_rows
        self._current = None
        self._has_repeats = False

    def repeats(self) -> IntArray | None:
        """Return what ``moves`` would for the batch as it is, or None if all rows are mirrored.

        A row that is twice in the batch is mirrored once; its edits do not reach the other.
        """
        return self.moves(self._requests) if self._has_repeats else None

    def moves(self, requests: IntArray) -> IntArray | None:
        """Return the records that copy or null what changed, or None if nothing did.

        What changed mirrors nothing until ``settle``, so that no edit writes it too.

        Args:
            requests: Rows in batch order, [N] int32; ``NOWHERE`` for padding.

        Raises:
            InvalidEditError: There is no such row.
        """
        if self._current == requests.tobytes():
            return None
        self._checks.requests(requests)
        records = self._records
        self._current = None
        self._requests = requests.copy()
        wanted = np.full(max(len(requests), self._num_used), _NULL, np.int64)
        wanted[: len(requests)] = requests
        holds = self._row_of[: len(wanted)]
        changed = np.flatnonzero(wanted != holds)
        mirrored = holds[changed] >= 0
        rows = holds[changed[mirrored]]
        self._filled[changed[mirrored]] = records.ints[rows][:, records.blocks_before]
        records.ints[rows, BATCH_ROW_AT] = NOWHERE
        self._row_of[changed] = _STALE

        self._changed, self._wanted = changed, wanted[changed]
        copies = records.ints.take(np.maximum(self._wanted, 0), axis=0)
        copies[self._wanted == _NULL, FIELDS_AT:] = 0
        copies[:, ROW_AT] = self._wanted
        copies[:, BATCH_ROW_AT] = changed
        copies[:, records.blocks_before] = self._filled[changed]
        return copies

    def settle(self, copies: IntArray) -> None:
        """The launch has carried out what ``moves`` returned.

        Call it after the rows' own records have settled.
        """
        records, changed, wanted = self._records, self._changed, self._wanted
        is_row = wanted >= 0
        unmirrored = is_row & (records.ints[wanted, BATCH_ROW_AT] == NOWHERE)
        # of a row that is twice in the batch, the last one mirrors it
        records.ints[wanted[unmirrored], BATCH_ROW_AT] = changed[unmirrored]
        mirrors = is_row & (records.ints[wanted, BATCH_ROW_AT] == changed)
        self._row_of[changed] = np.where(mirrors, wanted, np.where(is_row, _STALE, _NULL))
        self._filled[changed] = copies[:, records.blocks]
        self._num_used = len(self._requests)
        self._has_repeats = not np.array_equal(mirrors, is_row)
        self._current = None if self._has_repeats else self._requests.tobytes()
