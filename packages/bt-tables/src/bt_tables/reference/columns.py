"""The twin of ``kernels.columns``: what rows hold after a launch, and what it writes of them.

Dimensions: E entries, W columns, X whatever a caller asks for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bt_width import NULL_BLOCK

from .._launch.arrays import IntArray
from .._launch.wire import (
    BATCH_ROW_AT,
    FIELDS_AT,
    ROW_AT,
    GroupFacts,
    Header,
    RecordField,
    record_ints,
)


class Records(NamedTuple):
    """Records for one group, field by field as the wire has them, each [E] int64."""

    row: IntArray
    batch_row: IntArray
    base: IntArray
    keep: IntArray
    blocks_before: IntArray
    nulled_before: IntArray
    blocks: IntArray
    nulled: IntArray

    def pick(self, entry: IntArray) -> Records:
        """Return the records of ``entry``, in its order."""
        return Records(*(field[entry] for field in self))

    def and_untouched(self, width: int) -> Records:
        """Append the record of a row that nobody edits: it keeps everything it holds."""
        untouched = np.zeros((len(self), 1), np.int64)
        untouched[self._fields.index("keep")] = width
        return Records(*map(np.concatenate, zip(self, untouched, strict=True)))


def read_records(packet: IntArray, header: Header, group: int) -> Records:
    """Return what a packet's entries say of one group."""
    size = record_ints(header.num_groups)
    end = header.entries_at + header.num_entries * size
    records = packet[header.entries_at : end].reshape(header.num_entries, size).astype(np.int64)
    fields = (records[:, FIELDS_AT + field * header.num_groups + group] for field in RecordField)
    return Records(records[:, ROW_AT], records[:, BATCH_ROW_AT], *fields)


class GroupView(NamedTuple):
    """What the programs of one group see.

    Attributes:
        facts: The group's facts.
        rows: All groups' rows, flat int32.
        packet: The packet, int32.
    """

    facts: GroupFacts
    rows: IntArray
    packet: IntArray

    def ids_after(self, records: Records, column: IntArray) -> tuple[IntArray, IntArray]:
        """Return what rows hold in a column after the launch, and the places that were read.

        Args:
            records: The record of each row asked for, [X].
            column: A column of each, [X].
        """
        block, part = np.divmod(column, self.facts.split)
        is_live = block >= records.nulled
        is_old = is_live & (block < records.keep)
        is_fresh = is_live & ~is_old & (block < records.blocks)
        ids = np.full(len(column), NULL_BLOCK, np.int64)
        read = (self.facts.table_at + records.row * self.facts.width + column)[is_old]
        ids[is_old] = self.rows[read]
        fresh = self.packet[(records.base + block)[is_fresh]].astype(np.int64)
        expanded = fresh * self.facts.split + part[is_fresh]
        ids[is_fresh] = np.where(fresh == NULL_BLOCK, NULL_BLOCK, expanded)
        return ids, read


class Writes(NamedTuple):
    """Values for places of a flat tensor.

    Attributes:
        places: Where, [X].
        values: What, [X].
    """

    places: IntArray
    values: IntArray


class ColumnWork(NamedTuple):
    """What a launch does with the columns of one group.

    Attributes:
        read: Places of the flat rows that are read.
        rows: Writes to the flat rows.
        batch: Writes to the flat batch rows.
    """

    read: IntArray
    rows: Writes
    batch: Writes


def write_columns(group: GroupView, records: Records, num_edits: int) -> ColumnWork:
    """Return what the records, of which the first ``num_edits`` are edits, read and write."""
    split = group.facts.split
    is_edit = np.arange(len(records.row)) < num_edits
    # an edit writes the blocks it nulls, then those past what it keeps; a copy writes all
    null_end = np.minimum(records.nulled, records.keep)
    nulling = np.where(is_edit, np.maximum(null_end - records.nulled_before, 0), 0) * split
    start = np.where(is_edit, records.keep, 0) * split
    stop = np.maximum(records.blocks, records.blocks_before) * split

    lengths = nulling + stop - start
    entry = np.repeat(np.arange(len(lengths)), lengths)
    index = np.arange(len(entry)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    of_index = records.pick(entry)
    past_nulls = index - nulling[entry]
    column = np.where(
        past_nulls < 0, of_index.nulled_before * split + index, start[entry] + past_nulls
    )
    ids, read = group.ids_after(of_index, column)

    def writes(to_row: IntArray, is_written: IntArray) -> Writes:
        places = group.facts.table_at + to_row * group.facts.width + column
        return Writes(places[is_written], ids[is_written])

    return ColumnWork(
        read,
        rows=writes(of_index.row, is_edit[entry]),
        batch=writes(of_index.batch_row, of_index.batch_row >= 0),
    )
