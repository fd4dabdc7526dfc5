"""The twin of ``kernels.slots``: each token's place in the cache.

Dimensions: T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bt_width import MAX_POSITION, NULL_BLOCK, PAD_SLOT

from .._launch.arrays import IntArray
from .._launch.wire import EDIT_OF_ROW_AT, Header
from .columns import GroupView, Records


class TokenRows(NamedTuple):
    """The row and the position of each real token, [T] int64; row -1 is padding."""

    row: IntArray
    position: IntArray


def read_tokens(
    packet: IntArray, header: Header, starts: IntArray, positions: IntArray
) -> TokenRows:
    """Return the real tokens of a packet, or none where it maps no slots.

    Args:
        packet: The packet, int32.
        header: What it begins with.
        starts: Where the query starts are, int32: the packet, or the caller's.
        positions: Where the positions are, int64: the packet, or the caller's.
    """
    if not header.slots_end:
        return TokenRows(np.empty(0, np.int64), np.empty(0, np.int64))
    ends = starts[header.query_start_at :][: header.num_requests + 1]
    token = np.arange(min(int(ends[-1]), header.max_tokens))
    # an empty request ends where it starts and has no token
    request = np.searchsorted(ends[1:], token, side="right")
    return TokenRows(
        packet[header.requests_at + request].astype(np.int64),
        positions[header.positions_at + token],
    )


def map_slots(group: GroupView, records: Records, tokens: TokenRows) -> tuple[IntArray, IntArray]:
    """Return the slot of each real token, [T] int64, and the places of rows that were read."""
    facts = group.facts
    is_position = (tokens.position >= 0) & (tokens.position <= MAX_POSITION)
    position = np.where(is_position, tokens.position, 0)
    block, within = np.divmod(position, facts.block_size * facts.shards)
    block *= facts.advances
    run, in_run = np.divmod(within, facts.interleave)
    offset = run // facts.shards * facts.interleave + in_run
    is_ours = run % facts.shards == facts.rank
    has_slot = (tokens.row >= 0) & is_position & is_ours & (block < facts.slot_blocks)
    row, block, offset = tokens.row[has_slot], block[has_slot], offset[has_slot]
    # no edit is -1: the last record, of a row that nobody edits
    edit = group.packet[EDIT_OF_ROW_AT + row] - 1
    of_row = records.and_untouched(facts.width).pick(edit)._replace(row=row)
    ids, read = group.ids_after(of_row, block * facts.split)
    slots = np.full(len(tokens.row), PAD_SLOT, np.int64)
    slot = ids * facts.kernel_block_size + offset
    slots[has_slot] = np.where(ids == NULL_BLOCK, PAD_SLOT, slot)
    return slots, read
