"""The packet of a step, int by int, as the host writes it and a launch reads it.

A packet is one run of int32::

    header | edit_of_row [R] | ids | entries | requests [N] | query_start_loc [N + 1] | positions

``edit_of_row`` holds 1 + the entry that edits a row, or 0. The positions are int64
and start at an even int; they and the query starts are left out where the caller has
them on the device. An entry is a record: its row, its batch row, then each field of
``RecordField`` for every group. The first entries are edits, which write what changed
of a row and of the batch row that mirrors it; the others are copies, which write a
batch row whole.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

HEADER_INTS = 16
"""Ints before the row map; the header's fields and room for more."""

EDIT_OF_ROW_AT = HEADER_INTS

TOKEN_TILE = 128
"""Tokens whose slots one program maps."""

COLUMN_TILE = 512
"""Columns that one program writes at a time."""

NOWHERE = -1
"""A record's row or batch row where it has none, and a request that is padding."""

GROUP_FACTS = 16
"""Int64s that a group takes in the facts on the device."""


class Header(NamedTuple):
    """The first ints of a packet, in their order.

    Attributes:
        num_groups: Cache groups (G).
        entries_at: Where the first record starts.
        num_edits: Records that are edits.
        num_entries: All records, edits and copies.
        requests_at: Where the rows of the batch's requests start.
        num_requests: Requests of the batch (N).
        query_start_at: Where the query starts are, in the packet or the caller's tensor.
        positions_at: The same for the positions, counted in int64s.
        max_tokens: No token at or above it is real.
        slots_end: Slots are written up to here.
        token_tiles: Programs that map slots, for each group.
        chunks: Programs that share the columns of one record and group.
    """

    num_groups: int
    entries_at: int
    num_edits: int
    num_entries: int
    requests_at: int
    num_requests: int
    query_start_at: int
    positions_at: int
    max_tokens: int
    slots_end: int
    token_tiles: int
    chunks: int


HEADER_STRUCT = struct.Struct(f"={len(Header._fields)}i")

ROW_AT = 0
BATCH_ROW_AT = 1
FIELDS_AT = 2


class RecordField(IntEnum):
    """What a record says of each group, in blocks, in the order of the wire.

    After the launch, block ``b`` of the row is the null block below ``NULLED``, what the
    row held before below ``KEEP``, the packet's int ``BASE + b`` below ``BLOCKS``, and
    the null block from there on. The ``_BEFORE`` fields say how far the row, or a copy's
    batch row, was filled and nulled before the launch.
    """

    BASE = 0
    KEEP = 1
    BLOCKS_BEFORE = 2
    NULLED_BEFORE = 3
    BLOCKS = 4
    NULLED = 5


def record_ints(num_groups: int) -> int:
    """Return the ints of one record."""
    return FIELDS_AT + len(RecordField) * num_groups


class GroupFacts(NamedTuple):
    """What a launch has to know of a group, in their order on the device.

    Attributes:
        table_at: Where the group's table starts in the flat rows, and in the batch rows.
        slots_at: Where its slots start in the flat slots.
        width: Columns of a row (W).
        split: Kernel blocks of a block.
        block_size: Tokens of a block.
        kernel_block_size: Tokens of a kernel block.
        shards: Ranks that share a request's tokens.
        rank: This rank, 0 where nothing is shared.
        interleave: Consecutive tokens of one rank.
        advances: 1 where later blocks lie in later columns, 0 for a ring.
        slot_blocks: Blocks of a row that have slots; 0 for a group without slots.
    """

    table_at: int
    slots_at: int
    width: int
    split: int
    block_size: int
    kernel_block_size: int
    shards: int
    rank: int
    interleave: int
    advances: int
    slot_blocks: int
