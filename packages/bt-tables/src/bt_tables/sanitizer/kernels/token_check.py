"""A tile of one group's slots, each compared with the slot of the token's position.

R rows, N requests, T tokens, W columns.
"""

from __future__ import annotations

from ...triton_support import jit, tl
from .plan_line import (
    HAS_SLOTS,
    INTERLEAVE,
    KEEPS_STATE,
    KERNEL_BLOCK_SIZE,
    LAST_POSITION,
    NULL,
    NUM_SLOTS,
    PAD,
    RANK,
    SHARDS,
    SLOTS,
    TABLE,
    TABLE_ROW_STRIDE,
    WIDTH,
)


@jit()
def check_tokens(
    plan_ptr: tl.tensor,  # [NUM_FIELDS] int64
    seq_lens_ptr: tl.tensor,  # [N]
    starts_ptr: tl.tensor,  # [N + 1]
    token: tl.tensor,  # [tile] int32
    num_reqs: tl.tensor,
    SEARCH_STEPS: tl.constexpr,
) -> tl.tensor:
    """Return 1 where a slot of the tile is wrong, padding above the real tokens included."""
    is_slot = token < tl.load(plan_ptr + NUM_SLOTS)
    slots = tl.load(plan_ptr + SLOTS).to(tl.pointer_type(tl.int64))
    found = tl.load(slots + token, mask=is_slot, other=PAD)
    row, is_real = _row_of(starts_ptr, token, num_reqs, SEARCH_STEPS)
    end = tl.load(starts_ptr + row + 1, mask=is_real, other=0).to(tl.int64)
    length = tl.load(seq_lens_ptr + row, mask=is_real, other=0).to(tl.int64)
    position = length - end + token
    is_placed = is_real & (position >= 0) & (position <= LAST_POSITION)
    position = tl.where(is_placed, position, 0)

    size = tl.load(plan_ptr + KERNEL_BLOCK_SIZE)
    interleave, shards = tl.load(plan_ptr + INTERLEAVE), tl.load(plan_ptr + SHARDS)
    run = position // interleave
    local = run // shards * interleave + position % interleave
    local = tl.where(tl.load(plan_ptr + KEEPS_STATE) != 0, position % size, local)
    column, offset = local // size, local % size
    is_kept = is_placed & (run % shards == tl.load(plan_ptr + RANK))
    # a group without slots has no column with one
    has_slot = is_kept & (column < tl.load(plan_ptr + WIDTH) * tl.load(plan_ptr + HAS_SLOTS))
    table = tl.load(plan_ptr + TABLE).to(tl.pointer_type(tl.int32))
    place = row.to(tl.int64) * tl.load(plan_ptr + TABLE_ROW_STRIDE) + column
    ids = tl.load(table + place, mask=has_slot, other=0).to(tl.int64)
    expected = tl.where(has_slot & (ids > NULL), ids * size + offset, PAD)
    return tl.max((is_slot & (found != expected)).to(tl.int32), 0)


@jit()
def _row_of(
    starts_ptr: tl.tensor,  # [N + 1]
    token: tl.tensor,
    num_reqs: tl.tensor,
    SEARCH_STEPS: tl.constexpr,
) -> tl.tensor:
    """Return each token's request by binary search, and whether it has one."""
    low = token * 0
    high = low + num_reqs
    for _ in range(SEARCH_STEPS):
        middle = (low + high) // 2
        is_open = low < high
        end = tl.load(starts_ptr + middle + 1, mask=is_open, other=0)
        is_above = is_open & (end <= token)
        low = tl.where(is_above, middle + 1, low)
        high = tl.where(is_open & ~is_above, middle, high)
    return low, low < num_reqs
