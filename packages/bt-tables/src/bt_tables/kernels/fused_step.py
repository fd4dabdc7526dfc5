"""A whole step in one launch: rows written, batch rows copied, tokens mapped to slots.

Dimensions: R rows, N requests, T tokens, W columns, G groups. The first programs map
tiles of tokens to slots, the others write tiles of columns. Nothing that a program
writes is read by another: whoever needs a block that the step brings reads it from the
packet.
"""

from __future__ import annotations

import torch

from .._launch.executor import StepLaunch
from .._launch.storage import Storage
from .._launch.wire import COLUMN_TILE, TOKEN_TILE
from ..triton_support import jit, tl
from . import places as at


def step_launcher(storage: Storage) -> StepLaunch:
    """Return the launch of the kernel on these tables."""
    groups, rows, batch, slots = storage.groups, storage.rows, storage.batch, storage.slots
    search_steps = storage.num_rows.bit_length()

    def launch(
        packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
    ) -> None:
        fused_step_kernel[(programs,)](
            packet_ptr=packet,
            groups_ptr=groups,
            rows_ptr=rows,
            batch_ptr=batch,
            slots_ptr=slots,
            query_start_ptr=starts,
            positions_ptr=positions,
            SEARCH_STEPS=search_steps,
            TOKEN_TILE=TOKEN_TILE,
            COLUMN_TILE=COLUMN_TILE,
        )

    return launch


_ANYWHERE = (
    "packet_ptr",
    "groups_ptr",
    "rows_ptr",
    "batch_ptr",
    "slots_ptr",
    "query_start_ptr",
    "positions_ptr",
)


@jit(any_value=_ANYWHERE)
def fused_step_kernel(
    packet_ptr: tl.tensor,  # int32, see wire.py
    groups_ptr: tl.tensor,  # [G, GROUP_FACTS] int64
    rows_ptr: tl.tensor,  # flat, of each group [R, W] int32
    batch_ptr: tl.tensor,  # likewise; rows_ptr again where rows are the batch
    slots_ptr: tl.tensor,  # flat, of each group [T] int64
    query_start_ptr: tl.tensor,  # [N + 1] int32, from QUERY_START_AT on
    positions_ptr: tl.tensor,  # [T] int64, from POSITIONS_AT on
    SEARCH_STEPS: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
) -> None:
    """Carry out a packet."""
    program = tl.program_id(0)
    num_groups = tl.load(packet_ptr + at.NUM_GROUPS)
    token_programs = tl.load(packet_ptr + at.TOKEN_TILES) * num_groups
    if program < token_programs:
        _map_slots(
            program,
            packet_ptr,
            groups_ptr,
            rows_ptr,
            slots_ptr,
            query_start_ptr,
            positions_ptr,
            SEARCH_STEPS,
            TOKEN_TILE,
        )
    else:
        _write_columns(
            program - token_programs, packet_ptr, groups_ptr, rows_ptr, batch_ptr, COLUMN_TILE
        )


@jit()
def _write_columns(
    item: tl.tensor,
    packet_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    batch_ptr: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Write a share of one record's columns in one group."""
    num_groups = tl.load(packet_ptr + at.NUM_GROUPS)
    chunks = tl.load(packet_ptr + at.CHUNKS)
    group = item % num_groups
    chunk = item // num_groups % chunks
    entry = item // num_groups // chunks

    facts_ptr = groups_ptr + group * at.GROUP_FACTS
    width = tl.load(facts_ptr + at.WIDTH)
    split = tl.load(facts_ptr + at.SPLIT).to(tl.int32)
    record_ptr = packet_ptr + tl.load(packet_ptr + at.ENTRIES_AT)
    record_ptr += entry * (at.FIELDS + at.NUM_FIELDS * num_groups)
    field_ptr = record_ptr + at.FIELDS + group
    base = tl.load(field_ptr + at.BASE * num_groups)
    keep = tl.load(field_ptr + at.KEEP * num_groups)
    nulled_before = tl.load(field_ptr + at.NULLED_BEFORE * num_groups)
    blocks = tl.load(field_ptr + at.BLOCKS * num_groups)
    nulled = tl.load(field_ptr + at.NULLED * num_groups)
    stop = tl.maximum(blocks, tl.load(field_ptr + at.BLOCKS_BEFORE * num_groups))

    # an edit writes the blocks it nulls, then those past what it keeps; a copy writes all
    is_edit = entry < tl.load(packet_ptr + at.NUM_EDITS)
    nulling = tl.maximum(tl.minimum(nulled, keep) - nulled_before, 0)
    nulling = tl.where(is_edit, nulling, 0) * split
    start = tl.where(is_edit, keep, 0) * split
    end = nulling + stop * split - start
    end = tl.where(entry < tl.load(packet_ptr + at.NUM_ENTRIES), end, 0)

    row = tl.load(record_ptr + at.ROW).to(tl.int64)
    batch_row = tl.load(record_ptr + at.BATCH_ROW).to(tl.int64)
    table_at = tl.load(facts_ptr + at.TABLE_AT)
    # what is nowhere looks at row 0 and touches none of it
    row_ptr = rows_ptr + table_at + tl.maximum(row, 0) * width
    batch_row_ptr = batch_ptr + table_at + tl.maximum(batch_row, 0) * width
    row_end = tl.where(is_edit, end, 0)
    batch_end = tl.where(batch_row >= 0, end, 0)

    first = chunk * TILE
    while first < end:
        index = first + tl.arange(0, TILE)
        column = tl.where(index < nulling, nulled_before * split, start - nulling) + index
        ids = _ids_after(
            column, row_ptr, packet_ptr, split, base, keep, blocks, nulled, index < end
        )
        tl.store(row_ptr + column, ids, mask=index < row_end)
        tl.store(batch_row_ptr + column, ids, mask=index < batch_end)
        first += chunks * TILE


@jit()
def _ids_after(
    column: tl.tensor,
    row_ptr: tl.tensor,
    packet_ptr: tl.tensor,
    split: tl.tensor,
    base: tl.tensor,
    keep: tl.tensor,
    blocks: tl.tensor,
    nulled: tl.tensor,
    mask: tl.tensor,
) -> tl.tensor:
    """Return what a row holds in its columns after the launch."""
    block = column // split
    is_live = mask & (block >= nulled)
    is_fresh = is_live & (block >= keep) & (block < blocks)
    old = tl.load(row_ptr + column, mask=is_live & (block < keep), other=at.NULL)
    fresh = tl.load(packet_ptr + base + block, mask=is_fresh, other=at.NULL)
    return tl.where(fresh == at.NULL, old, fresh * split + column % split)


@jit()
def _map_slots(
    program: tl.tensor,
    packet_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    SEARCH_STEPS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Map one tile of tokens to their slots in one group."""
    num_groups = tl.load(packet_ptr + at.NUM_GROUPS)
    group = program % num_groups
    token = program // num_groups * TILE + tl.arange(0, TILE)
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
    ids = _ids_after(block * split, row_ptr, packet_ptr, split, base, keep, blocks, nulled, is_ours)
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
