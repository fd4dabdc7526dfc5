"""The kernels' plain twins: the truth for their tests, and what runs on the CPU.

A twin reads everything a launch reads before it writes anything, as if all programs ran
at once, and says what it would read and write, so that a test can prove that no program
of a launch waits for another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from bt_width import NULL_BLOCK, PAD_SLOT

from ._launch.arrays import IntArray
from ._launch.executor import StepLaunch
from ._launch.storage import Storage
from ._launch.wire import EDIT_OF_ROW_AT, FIELDS_AT, GroupFacts, Header, RecordField, record_ints

_MAX_POSITION = 2**31 - 1


class Writes(NamedTuple):
    """Values for places of a flat tensor.

    Attributes:
        places: Where, [X].
        values: What, [X].
    """

    places: IntArray
    values: IntArray


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


class _Records(NamedTuple):
    """Records for one group, field by field, each [E] int64."""

    row: IntArray
    batch_row: IntArray
    base: IntArray
    keep: IntArray
    blocks_before: IntArray
    nulled_before: IntArray
    blocks: IntArray
    nulled: IntArray

    def pick(self, entry: IntArray) -> _Records:
        """Return the records of ``entry``, in its order."""
        return _Records(*(field[entry] for field in self))


class _TokenRows(NamedTuple):
    """The row and the position of each real token, [T] int64; row -1 is padding."""

    row: IntArray
    position: IntArray


class _Group(NamedTuple):
    """What the programs of one group see."""

    facts: GroupFacts
    rows: IntArray
    packet: IntArray

    def ids_after(self, records: _Records, column: IntArray) -> tuple[IntArray, IntArray]:
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


def step_twin(storage: Storage) -> StepLaunch:
    """Return the launch of ``fused_step`` on tables of the CPU."""

    def launch(
        packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
    ) -> None:
        del programs  # a twin needs one
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


def step_work(
    storage: Storage, packet: IntArray, starts: IntArray, positions: IntArray
) -> StepWork:
    """Return all that a packet asks for; nothing is written."""
    header = Header._make(packet[: len(Header._fields)].tolist())
    tokens = _read_tokens(header, packet, starts, positions)
    parts = []
    for number, facts in enumerate(storage.facts):
        group = _Group(facts, storage.rows.numpy(), packet)
        records = _read_records(packet, header, number)
        rows_read, rows, batch = _write_columns(group, records, header.num_edits)
        slots, slots_read = _map_slots(group, records, tokens)
        padded = np.full(header.slots_end, PAD_SLOT, np.int64)
        padded[: len(slots)] = slots
        places = facts.slots_at + np.arange(header.slots_end)
        read = np.concatenate((rows_read, slots_read))
        parts.append(StepWork(read, rows, batch, Writes(places, padded)))
    return StepWork(
        np.concatenate([part.rows_read for part in parts]),
        _joined([part.rows for part in parts]),
        _joined([part.batch for part in parts]),
        _joined([part.slots for part in parts]),
    )


def _joined(parts: list[Writes]) -> Writes:
    return Writes(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _read_tokens(
    header: Header, packet: IntArray, starts: IntArray, positions: IntArray
) -> _TokenRows:
    if not header.slots_end:
        return _TokenRows(np.empty(0, np.int64), np.empty(0, np.int64))
    ends = starts[header.query_start_at :][: header.num_requests + 1]
    token = np.arange(min(int(ends[-1]), header.max_tokens))
    # an empty request ends where it starts and has no token
    request = np.searchsorted(ends[1:], token, side="right")
    return _TokenRows(
        packet[header.requests_at + request].astype(np.int64),
        positions[header.positions_at + token],
    )


def _read_records(packet: IntArray, header: Header, group: int) -> _Records:
    size = record_ints(header.num_groups)
    end = header.entries_at + header.num_entries * size
    records = packet[header.entries_at : end].reshape(header.num_entries, size).astype(np.int64)
    fields = (records[:, FIELDS_AT + field * header.num_groups + group] for field in RecordField)
    return _Records(records[:, 0], records[:, 1], *fields)


def _write_columns(
    group: _Group, records: _Records, num_edits: int
) -> tuple[IntArray, Writes, Writes]:
    """Return the places read, the writes to rows and those to batch rows."""
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

    in_rows = writes(of_index.row, is_edit[entry])
    return read, in_rows, writes(of_index.batch_row, of_index.batch_row >= 0)


def _map_slots(group: _Group, records: _Records, tokens: _TokenRows) -> tuple[IntArray, IntArray]:
    """Return the slot of each real token, and the places read."""
    facts = group.facts
    position = np.where(
        (tokens.position >= 0) & (tokens.position <= _MAX_POSITION), tokens.position, 0
    )
    block, within = np.divmod(position, facts.block_size * facts.shards)
    block *= facts.advances
    run, in_run = np.divmod(within, facts.interleave)
    offset = run // facts.shards * facts.interleave + in_run
    has_slot = (
        (tokens.row >= 0)
        & (position == tokens.position)
        & (run % facts.shards == facts.rank)
        & (block < facts.slot_blocks)
    )
    row, block, offset = tokens.row[has_slot], block[has_slot], offset[has_slot]
    # a row that nobody edits keeps everything it holds
    edit = group.packet[EDIT_OF_ROW_AT + row] - 1
    kept = np.array([0, 0, 0, facts.width, 0, 0, 0, 0])
    untouched = _Records(*kept[:, None])
    with_last = _Records(*map(np.concatenate, zip(records, untouched, strict=True)))
    of_row = with_last.pick(edit)._replace(row=row)
    ids, read = group.ids_after(of_row, block * facts.split)
    slots = np.full(len(tokens.row), PAD_SLOT, np.int64)
    slot = ids * facts.kernel_block_size + offset
    slots[has_slot] = np.where(ids == NULL_BLOCK, PAD_SLOT, slot)
    return slots, read


def gather_csr(
    table: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, tokens_per_column: int
) -> None:
    """Fill ``indices`` with the ids of each request, or with the slots of its tokens.

    Args:
        table: The batch's table, [N, W] int32.
        indptr: Where each request's elements start, and the end of the last, [N + 1] int32.
        indices: Flat: int32 for ids, int64 for slots.
        tokens_per_column: Tokens of a kernel block for slots, 0 for ids.
    """
    starts = indptr[:-1].long()
    request = torch.repeat_interleave(torch.arange(len(starts)), indptr.diff().long())
    in_request = torch.arange(indices.numel()) - starts[request]
    per_column = max(tokens_per_column, 1)
    ids = table[request, in_request // per_column].long()
    if tokens_per_column:
        slots = ids * per_column + in_request % per_column
        ids = torch.where(ids == NULL_BLOCK, PAD_SLOT, slots)
    indices.copy_(ids)
