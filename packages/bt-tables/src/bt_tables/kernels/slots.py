"""The slots of a step: a tile of tokens, each mapped to its place in the cache.

Dimensions: R rows, N requests, T tokens, W columns, G groups.
"""

from __future__ import annotations

from ..triton_support import jit, tl
from . import places as at
from .columns import ids_after


@jit()
def map_slots(
    item: tl.tensor,  # the tile's number: groups first, then tiles
    packet_ptr: tl.tensor,  # int32, see wire.py
    groups_ptr: tl.tensor,  # [G, GROUP_FACTS] int64
    rows_ptr: tl.tensor,  # flat, of each group [R, W] int32
    slots_ptr: tl.tensor,  # flat, of each group [T] int64
    query_start_ptr: tl.tensor,  # [N + 1] int32, from QUERY_START_AT on
    positions_ptr: tl.tensor,  # [T] int64, from POSITIONS_AT on
    SEARCH_STEPS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Map one tile of tokens to their slots in one group."""
    num_groups = tl.load(packet_ptr + at.NUM_GROUPS)
    group = item % num_groups
    token = item // num_groups * TILE + tl.arange(0, TILE)
    row = _row_of_token(token, packet_ptr, query_start_ptr, SEARCH_STEPS)
    is_real = row >= 0
    positions_ptr += tl.load(packet_ptr + at.POSITIONS_AT)
    position = tl.load(positions_ptr + token, mask=is_real, other=-1)
    is_real &= (position >= 0) & (position <= at.LAST_POSITION)
    position = tl.where(is_real, position, 0).to(tl.int32)

    facts_ptr = groups_ptr + group * at.GROUP_FACTS
    block_size = tl.load(facts_ptr + at.BLOCK_SIZE).to(tl.int32)
    shards = tl.load(facts_ptr + at.SHARDS).to(tl.int32)
    interleave = tl.load(facts_ptr + at.INTERLEAVE).to(tl.int32)
    block = position // (block_size * shards) * tl.load(facts_ptr + at.ADVANCES).to(tl.int32)
    within = position % (block_size * shards)
    run = within // interleave
    offset = run // shards * interleave + within % interleave
    is_ours = run % shards == tl.load(facts_ptr + at.RANK).to(tl.int32)
    is_ours &= is_real & (block < tl.load(facts_ptr + at.SLOT_BLOCKS).to(tl.int32))

    # a row that nobody edits keeps everything it holds
    edit = tl.load(packet_ptr + at.EDIT_OF_ROW + row, mask=is_ours, other=0)
    is_edited = edit > 0
    record_ints = at.FIELDS + at.NUM_FIELDS * num_groups
    field_ptr = packet_ptr + tl.load(packet_ptr + at.ENTRIES_AT) + at.FIELDS + group
    field_ptr += (edit - 1) * record_ints
    base = tl.load(field_ptr + at.BASE * num_groups, mask=is_edited, other=0)
    keep = tl.load(field_ptr + at.KEEP * num_groups, mask=is_edited, other=at.LAST_POSITION)
    blocks = tl.load(field_ptr + at.BLOCKS * num_groups, mask=is_edited, other=0)
    nulled = tl.load(field_ptr + at.NULLED * num_groups, mask=is_edited, other=0)

    split = tl.load(facts_ptr + at.SPLIT).to(tl.int32)
    row_ptr = rows_ptr + tl.load(facts_ptr + at.TABLE_AT)
    row_ptr += row.to(tl.int64) * tl.load(facts_ptr + at.WIDTH)
    ids = ids_after(block * split, row_ptr, packet_ptr, split, base, keep, blocks, nulled, is_ours)
    slot = ids.to(tl.int64) * tl.load(facts_ptr + at.KERNEL_BLOCK_SIZE) + offset
    slot = tl.where(ids == at.NULL, at.PAD, slot)
    slots_ptr += tl.load(facts_ptr + at.SLOTS_AT)
    tl.store(slots_ptr + token, slot, mask=token < tl.load(packet_ptr + at.SLOTS_END))


@jit()
def _row_of_token(
    token: tl.tensor, packet_ptr: tl.tensor, query_start_ptr: tl.tensor, SEARCH_STEPS: tl.constexpr
) -> tl.tensor:
    """Return the row of each token's request, negative where the token is padding."""
    num_requests = tl.load(packet_ptr + at.NUM_REQUESTS)
    query_start_ptr += tl.load(packet_ptr + at.QUERY_START_AT)
    num_tokens = tl.load(query_start_ptr + num_requests)
    num_tokens = tl.minimum(num_tokens, tl.load(packet_ptr + at.MAX_TOKENS))
    is_real = token < num_tokens
    # the last request that starts at or before the token; empty ones start where it ends
    low = tl.zeros_like(token)
    high = low + num_requests - 1
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high + 1) // 2
        start = tl.load(query_start_ptr + middle, mask=is_real, other=0)
        low = tl.where(start <= token, middle, low)
        high = tl.where(start <= token, high, middle - 1)
    requests_ptr = packet_ptr + tl.load(packet_ptr + at.REQUESTS_AT)
    return tl.load(requests_ptr + low, mask=is_real, other=-1)
