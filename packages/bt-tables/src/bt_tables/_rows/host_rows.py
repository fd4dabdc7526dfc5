"""Rows in batch order with a copy on the host, which is the truth.

Every edit changes the host's copy and the row's record: how far the device still agrees
(``keep``) and what it holds (``blocks_before``). A commit sends what lies between.
"""

from __future__ import annotations

import numpy as np

from .._launch.arrays import IntArray
from .._launch.engine import NO_ENTRIES, NO_RECORDS, Entries, StepEngine
from .._launch.tokens import Tokens
from .records import RowRecords
from .runs import run_places


class HostRows:
    """The rows on the host, and which of them the device does not hold."""

    def __init__(self, engine: StepEngine, records: RowRecords) -> None:
        """Start with empty rows on both sides."""
        self._engine = engine
        self._records = records
        self._batch_order = np.arange(records.num_rows, dtype=np.int32)
        blocks = records.blocks_per_row.astype(np.int64)
        # a row's ids lie group by group, each group with room for all that it can hold
        self._group_at = blocks.cumsum() - blocks
        self._ids = np.zeros((records.num_rows, int(blocks.sum())), np.int32)
        self._is_dirty = np.zeros(records.num_rows, np.bool_)
        # no row at or above it holds anything on the device
        self._num_shown = 0

    def append(self, row: int, counts: IntArray, ids: IntArray) -> None:
        """Add ids, group by group, behind what the row holds; both were checked."""
        held = self._records.ints[row, self._records.blocks]
        places, _ = run_places(self._group_at + held, counts)
        self._ids[row, places] = ids
        held += counts.astype(np.int32)
        self._is_dirty[row] = True

    def clear(self, row: int) -> None:
        """Take everything from a row."""
        record = self._records.ints[row]
        record[self._records.keep] = 0
        record[self._records.after] = 0
        self._is_dirty[row] = True

    def null_prefix(self, row: int, group: int, num_blocks: int) -> None:
        """Null a row's first blocks; the count was checked."""
        nulled = self._records.ints[row, self._records.nulled]
        if num_blocks > nulled[group]:
            nulled[group] = num_blocks
            self._is_dirty[row] = True

    def move(self, source: int, target: int) -> None:
        """Put a row in another's place, and leave its own empty."""
        if source != target:
            self._replace(target, *self._contents(source))
            self.clear(source)

    def swap(self, first: int, second: int) -> None:
        """Exchange two rows."""
        held = self._contents(first)
        self._replace(first, *self._contents(second))
        self._replace(second, *held)

    def commit(self, num_reqs: int) -> None:
        """Launch what changed in the first ``num_reqs`` rows, and null those above."""
        rows, edits = self._changes(num_reqs)
        self._run(Entries(edits, NO_RECORDS, self._records.longest_row), 0, None)
        self._settle(rows, edits, num_reqs)

    def map_tokens(self, num_reqs: int, tokens: Tokens) -> None:
        """Launch the mapping of tokens, whose requests are the first ``num_reqs`` rows."""
        self._run(NO_ENTRIES, num_reqs, tokens)

    def forget(self) -> None:
        """Any row and any slot may hold anything on the device from now on."""
        records = self._records
        records.ints[:, records.keep] = 0
        records.ints[:, records.nulled_before] = 0
        records.ints[:, records.blocks_before] = records.blocks_per_row
        self._is_dirty.fill(True)
        self._num_shown = records.num_rows
        self._engine.forget_slots()

    def restore(self) -> None:
        """Write the facts to where they lie; the next commit writes the rows."""
        self._engine.storage.fill_groups()
        self.forget()

    def _run(self, entries: Entries, num_reqs: int, tokens: Tokens | None) -> None:
        try:
            self._engine.run(entries, self._batch_order[:num_reqs], tokens)
        except BaseException:
            self._engine.await_packet()
            self.forget()
            raise

    def _changes(self, num_reqs: int) -> tuple[IntArray, IntArray]:
        """Return the rows that a commit changes on the device, and their records.

        The ids they bring are put into the open packet. Rows at or above ``num_reqs``
        become empty on the device and stay as they are on the host.
        """
        records = self._records
        rows = np.flatnonzero(self._is_dirty[:num_reqs])
        found = records.ints.take(rows, axis=0)
        keep = found[:, records.keep]
        lengths = found[:, records.blocks] - keep
        places, starts = run_places(self._group_at + keep, lengths)
        of_row = np.repeat(rows, lengths.sum(axis=1))
        ids_at = self._engine.ring.put(self._ids[of_row, places])
        found[:, records.base] = ids_at + starts - keep

        hidden = np.arange(num_reqs, self._num_shown)
        empty = records.ints.take(hidden, axis=0)
        empty[:, records.keep] = 0
        empty[:, records.after] = 0
        return np.concatenate((rows, hidden)), np.concatenate((found, empty))

    def _settle(self, rows: IntArray, found: IntArray, num_reqs: int) -> None:
        """The launch has carried out what ``_changes`` returned."""
        records = self._records
        hidden = rows[rows >= num_reqs]
        held = records.ints[hidden][:, records.after]
        records.settle(rows, found)
        records.ints[hidden, records.after] = held
        self._is_dirty[rows] = False
        self._is_dirty[hidden] = True
        self._num_shown = num_reqs

    def _contents(self, row: int) -> tuple[IntArray, IntArray]:
        """Return a copy of a row's record and of its ids, group by group."""
        record = self._records.ints[row].copy()
        places, _ = run_places(self._group_at, record[self._records.blocks])
        return record, self._ids[row, places]

    def _replace(self, row: int, record: IntArray, ids: IntArray) -> None:
        """Let a row hold what ``_contents`` returned."""
        self.clear(row)
        places, _ = run_places(self._group_at, record[self._records.blocks])
        self._ids[row, places] = ids
        self._records.ints[row, self._records.after] = record[self._records.after]
