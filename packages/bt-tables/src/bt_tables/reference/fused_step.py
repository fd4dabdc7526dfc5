"""The reference of ``kernels.fused_step``: a whole step, group after group.

Dimensions: E entries, T tokens, W columns, X whatever a caller asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from bt_width import MAX_POSITION, NULL_BLOCK, PAD_SLOT

from .._packet import (
    BATCH_ROW_AT,
    EDIT_OF_ROW_AT,
    FIELDS_AT,
    ROW_AT,
    Header,
    IntArray,
    RecordField,
    TableGroup,
)
from .addressing import kernel_block_id, locate

if TYPE_CHECKING:
    from .._storage import Storage
    from ..devices import StepLaunch


def reference_step(storage: Storage) -> StepLaunch:
    """Return the launch of ``fused_step`` on tables of the CPU."""

    def launch(
        packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
    ) -> None:
        del programs  # the reference needs one
        fused_step(storage, packet.numpy(), starts.numpy(), positions.numpy())

    return launch


def fused_step(storage: Storage, packet: IntArray, starts: IntArray, positions: IntArray) -> None:
    """Carry out a packet: write rows and batch rows, map tokens to slots.

    Args:
        storage: The tables.
        packet: The packet, int32.
        starts: Where the query starts are, int32: the packet, or the caller's.
        positions: Where the positions are, int64: the packet, or the caller's.
    """
    work = step_work(storage, packet, starts, positions)
    storage.rows.numpy()[work.rows.places] = work.rows.values
    storage.batch.numpy()[work.batch.places] = work.batch.values
    storage.slots.numpy()[work.slots.places] = work.slots.values


class Writes(NamedTuple):
    """Values for places of a flat tensor.

    Attributes:
        places: Where, [X].
        values: What, [X].
    """

    places: IntArray
    values: IntArray


_NO_WRITES = Writes(np.empty(0, np.int64), np.empty(0, np.int64))


class StepWork(NamedTuple):
    """All that a step's launch reads from the tables and writes to them.

    Attributes:
        rows_read: Places of the flat rows that are read.
        rows: Writes to the flat rows.
        batch: Writes to the flat batch rows.
        slots: Writes to the flat slots.
    """

    rows_read: IntArray
    rows: Writes
    batch: Writes
    slots: Writes


def step_work(
    storage: Storage, packet: IntArray, starts: IntArray, positions: IntArray
) -> StepWork:
    """Return all that a packet asks for; the arguments are those of ``fused_step``."""
    header = Header._make(packet[: len(Header._fields)].tolist())
    tokens = _read_tokens(packet, header, starts, positions)
    parts = []
    for number, of_group in enumerate(storage.groups):
        group = _GroupView(of_group, storage.rows.numpy(), packet)
        entries = _read_entries(packet, header, number)
        columns_read, rows, batch = _write_columns(group, entries, header.num_edits)
        slots, slots_read = _map_slots(group, entries, tokens)
        padded = np.full(header.slots_end, PAD_SLOT, np.int64)
        padded[: len(slots)] = slots
        places = of_group.slots_at + np.arange(header.slots_end)
        read = np.concatenate((columns_read, slots_read))
        parts.append(StepWork(read, rows, batch, Writes(places, padded)))
    return StepWork(
        np.concatenate([part.rows_read for part in parts]),
        _joined([part.rows for part in parts]),
        _joined([part.batch for part in parts]),
        _joined([part.slots for part in parts]),
    )


def _joined(parts: list[Writes]) -> Writes:
    return Writes(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class _Records(NamedTuple):
    """Records for one group, field by field as the packet has them, each [E] int64."""

    row: IntArray
    batch_row: IntArray
    base: IntArray
    keep: IntArray
    blocks_before: IntArray
    nulled_before: IntArray
    blocks: IntArray
    nulled: IntArray


def _read_entries(packet: IntArray, header: Header, group: int) -> IntArray:
    """Return what a packet's entries say of one group, [fields of ``_Records``, E] int64."""
    size = FIELDS_AT + len(RecordField) * header.num_groups
    end = header.entries_at + header.num_entries * size
    records = packet[header.entries_at : end].reshape(header.num_entries, size)
    fields = [FIELDS_AT + field * header.num_groups + group for field in RecordField]
    return records.T[[ROW_AT, BATCH_ROW_AT, *fields]].astype(np.int64)


class _GroupView(NamedTuple):
    """What the programs of one group see: it, all groups' flat rows, and the packet."""

    group: TableGroup
    rows: IntArray
    packet: IntArray

    def ids_after(self, records: _Records, column: IntArray) -> tuple[IntArray, IntArray]:
        """Return what rows hold in a column after the launch, and the places that were read.

        Args:
            records: The record of each row asked for, [X].
            column: A column of each, [X].
        """
        addressing = self.group.addressing
        block, part = np.divmod(column, addressing.kernel_blocks_per_block)
        is_live = block >= records.nulled
        is_old = is_live & (block < records.keep)
        is_fresh = is_live & ~is_old & (block < records.blocks)
        ids = np.full(len(column), NULL_BLOCK, np.int64)
        read = (self.group.table_at + records.row * addressing.width + column)[is_old]
        ids[is_old] = self.rows[read]
        fresh = self.packet[(records.base + block)[is_fresh]].astype(np.int64)
        ids[is_fresh] = kernel_block_id(addressing, fresh, part[is_fresh])
        return ids, read


def _write_columns(
    view: _GroupView, entries: IntArray, num_edits: int
) -> tuple[IntArray, Writes, Writes]:
    """Return the places that the records read, and what they write to rows and batch rows."""
    if not entries.shape[1]:
        return _NO_WRITES.places, _NO_WRITES, _NO_WRITES
    records = _Records(*entries)
    split, width = view.group.addressing.kernel_blocks_per_block, view.group.addressing.width
    is_edit = np.arange(entries.shape[1]) < num_edits
    # an edit writes the blocks it nulls, then those past what it keeps; a copy writes all
    null_end = np.minimum(records.nulled, records.keep)
    nulling = np.where(is_edit, np.maximum(null_end - records.nulled_before, 0), 0) * split
    start = np.where(is_edit, records.keep, 0) * split
    stop = np.maximum(records.blocks, records.blocks_before) * split

    lengths = nulling + stop - start
    entry = np.repeat(np.arange(len(lengths)), lengths)
    index = np.arange(len(entry)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    of_index = _Records(*entries[:, entry])
    past_nulls = index - nulling[entry]
    column = np.where(
        past_nulls < 0, of_index.nulled_before * split + index, start[entry] + past_nulls
    )
    ids, read = view.ids_after(of_index, column)

    def writes(to_row: IntArray, is_written: IntArray) -> Writes:
        places = view.group.table_at + to_row * width + column
        return Writes(places[is_written], ids[is_written])

    rows = writes(of_index.row, is_edit[entry])
    return read, rows, writes(of_index.batch_row, of_index.batch_row >= 0)


class _TokenRows(NamedTuple):
    """The row and the position of each token, [T] int64; row -1 is padding."""

    row: IntArray
    position: IntArray


def _read_tokens(
    packet: IntArray, header: Header, starts: IntArray, positions: IntArray
) -> _TokenRows:
    """Return the tokens of a packet that may be real, or none where it maps no slots."""
    num_requests = header.num_requests
    if not (header.slots_end and num_requests):
        return _TokenRows(np.empty(0, np.int64), np.empty(0, np.int64))
    ends = starts[header.query_start_at :][: num_requests + 1].astype(np.int64)
    token = np.arange(max(min(int(ends[-1]), header.max_tokens), 0))
    rows = packet[header.requests_at : header.requests_at + num_requests].astype(np.int64)
    its_positions = positions[header.positions_at : header.positions_at + len(token)]
    counts = np.diff(ends)
    if ends[0] == 0 and (counts >= 0).all():
        return _TokenRows(np.repeat(rows, counts)[: len(token)], its_positions)
    # a caller's starts on the device may be in no order: the last request that starts at or
    # before the token, found as the kernel finds it
    low, high = np.zeros_like(token), np.full_like(token, num_requests - 1)
    while (low < high).any():
        middle = (low + high + 1) // 2
        starts_here = ends[middle] <= token
        low, high = np.where(starts_here, middle, low), np.where(starts_here, high, middle - 1)
    is_real = (ends[low] >= 0) & (ends[low] <= token) & (token < ends[low + 1])
    return _TokenRows(np.where(is_real, rows[low], -1), its_positions)


def _map_slots(
    view: _GroupView, entries: IntArray, tokens: _TokenRows
) -> tuple[IntArray, IntArray]:
    """Return the slot of each token, [T] int64, and the places of rows that were read."""
    slots = np.full(len(tokens.row), PAD_SLOT, np.int64)
    addressing = view.group.addressing
    if not addressing.slot_blocks:
        return slots, np.empty(0, np.int64)
    num_columns = addressing.slot_blocks * addressing.kernel_blocks_per_block
    is_own = (tokens.row >= 0) & (tokens.position >= 0) & (tokens.position <= MAX_POSITION)
    token = np.flatnonzero(is_own)
    rank, column, offset = locate(addressing, tokens.position[token])
    has_slot = (rank == addressing.rank) & (column < num_columns)
    token, column, offset = token[has_slot], column[has_slot], offset[has_slot]
    row = tokens.row[token]
    # tokens of one request stand together, and the first in each column speaks for its column
    is_first = np.ones(len(row), bool)
    is_first[1:] = (row[1:] != row[:-1]) | (column[1:] != column[:-1])
    first = np.flatnonzero(is_first)
    # a row without an edit, which has none at 0 - 1, keeps everything it holds
    untouched = np.zeros((len(entries), 1), np.int64)
    untouched[_Records._fields.index("keep")] = addressing.width
    edit = view.packet[EDIT_OF_ROW_AT + row[first]] - 1
    of_row = _Records(*np.concatenate((entries, untouched), axis=1)[:, edit])
    of_row = of_row._replace(row=row[first])
    ids, read = view.ids_after(of_row, column[first])
    ids = np.repeat(ids, np.diff(first, append=len(row)))
    slot = ids * addressing.kernel_block_size + offset
    slots[token] = np.where(ids == NULL_BLOCK, PAD_SLOT, slot)
    return slots, read
