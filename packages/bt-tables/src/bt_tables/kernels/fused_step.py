"""A whole step in one launch: rows written, batch rows copied, tokens mapped to slots.

Dimensions: R rows, N requests, T tokens, W columns, G groups. The first programs map
tiles of tokens to slots, the others write tiles of columns. Nothing that a program
writes is read by another: whoever needs a block that the step brings reads it from the
packet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bt_width import MAX_POSITION, NULL_BLOCK, PAD_SLOT

from .. import _packet
from .._packet import COLUMN_TILE, GROUP_FIELDS, TOKEN_TILE, Header, RecordField
from ..triton_support import jit, tl
from .addressing import kernel_block_id, locate_local

if TYPE_CHECKING:
    from .._storage import Storage
    from ..devices import StepLaunch


def _header(field: str) -> tl.constexpr:
    return tl.constexpr(Header._fields.index(field))


def _group(field: str) -> tl.constexpr:
    return tl.constexpr(GROUP_FIELDS.index(field))


NULL = tl.constexpr(NULL_BLOCK)
PAD = tl.constexpr(PAD_SLOT)
LAST_POSITION = tl.constexpr(MAX_POSITION)

# where the header, a record and a group have their ints
NUM_GROUPS = _header("num_groups")
ENTRIES_AT = _header("entries_at")
NUM_EDITS = _header("num_edits")
NUM_ENTRIES = _header("num_entries")
REQUESTS_AT = _header("requests_at")
NUM_REQUESTS = _header("num_requests")
QUERY_START_AT = _header("query_start_at")
POSITIONS_AT = _header("positions_at")
MAX_TOKENS = _header("max_tokens")
SLOTS_END = _header("slots_end")
TOKEN_TILES = _header("token_tiles")
CHUNKS = _header("chunks")
EDIT_OF_ROW = tl.constexpr(_packet.EDIT_OF_ROW_AT)

ROW = tl.constexpr(_packet.ROW_AT)
BATCH_ROW = tl.constexpr(_packet.BATCH_ROW_AT)
FIELDS = tl.constexpr(_packet.FIELDS_AT)
NUM_FIELDS = tl.constexpr(len(RecordField))
BASE = tl.constexpr(RecordField.BASE.value)
KEEP = tl.constexpr(RecordField.KEEP.value)
BLOCKS_BEFORE = tl.constexpr(RecordField.BLOCKS_BEFORE.value)
NULLED_BEFORE = tl.constexpr(RecordField.NULLED_BEFORE.value)
BLOCKS = tl.constexpr(RecordField.BLOCKS.value)
NULLED = tl.constexpr(RecordField.NULLED.value)

GROUP_INTS = tl.constexpr(len(GROUP_FIELDS))
TABLE_AT = _group("table_at")
SLOTS_AT = _group("slots_at")
WIDTH = _group("width")
SPLIT = _group("kernel_blocks_per_block")
BLOCK_SIZE = _group("block_size")
KERNEL_BLOCK_SIZE = _group("kernel_block_size")
SHARDS_AT = _group("shards")
RANK_AT = _group("rank")
INTERLEAVE_AT = _group("interleave")
ADVANCES = _group("advances")
SLOT_BLOCKS = _group("slot_blocks")


def step_launcher(storage: Storage) -> StepLaunch:
    """Return the launch of the kernel on these tables."""
    groups, rows, batch, slots = storage.device_groups, storage.rows, storage.batch, storage.slots
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


@jit
def fused_step_kernel(
    packet_ptr: tl.tensor,  # int32, see _packet.py
    groups_ptr: tl.tensor,  # [G, GROUP_INTS] int64
    rows_ptr: tl.tensor,  # flat, of each group [R, W] int32
    batch_ptr: tl.tensor,  # likewise
    slots_ptr: tl.tensor,  # flat, of each group [T] int64
    query_start_ptr: tl.tensor,  # [N + 1] int32, from QUERY_START_AT on
    positions_ptr: tl.tensor,  # [T] int64, from POSITIONS_AT on
    SEARCH_STEPS: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
) -> None:
    """Carry out a packet."""
    program = tl.program_id(0)
    num_groups = tl.load(packet_ptr + NUM_GROUPS)
    token_programs = tl.load(packet_ptr + TOKEN_TILES) * num_groups
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


@jit
def _write_columns(
    item: tl.tensor,  # the share's number: groups first, then chunks, then entries
    packet_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    batch_ptr: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Write a share of one record's columns in one group."""
    num_groups = tl.load(packet_ptr + NUM_GROUPS)
    chunks = tl.load(packet_ptr + CHUNKS)
    group = item % num_groups
    chunk = item // num_groups % chunks
    entry = item // num_groups // chunks

    group_ptr = groups_ptr + group * GROUP_INTS
    width = tl.load(group_ptr + WIDTH)
    split = tl.load(group_ptr + SPLIT).to(tl.int32)
    record_ptr = packet_ptr + tl.load(packet_ptr + ENTRIES_AT)
    record_ptr += entry * (FIELDS + NUM_FIELDS * num_groups)
    field_ptr = record_ptr + FIELDS + group
    base = tl.load(field_ptr + BASE * num_groups)
    keep = tl.load(field_ptr + KEEP * num_groups)
    nulled_before = tl.load(field_ptr + NULLED_BEFORE * num_groups)
    blocks = tl.load(field_ptr + BLOCKS * num_groups)
    nulled = tl.load(field_ptr + NULLED * num_groups)
    stop = tl.maximum(blocks, tl.load(field_ptr + BLOCKS_BEFORE * num_groups))

    # an edit writes the blocks it nulls, then those past what it keeps; a copy writes all
    is_edit = entry < tl.load(packet_ptr + NUM_EDITS)
    nulling = tl.maximum(tl.minimum(nulled, keep) - nulled_before, 0)
    nulling = tl.where(is_edit, nulling, 0) * split
    start = tl.where(is_edit, keep, 0) * split
    end = nulling + stop * split - start
    end = tl.where(entry < tl.load(packet_ptr + NUM_ENTRIES), end, 0)

    row = tl.load(record_ptr + ROW).to(tl.int64)
    batch_row = tl.load(record_ptr + BATCH_ROW).to(tl.int64)
    table_at = tl.load(group_ptr + TABLE_AT)
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


@jit
def _map_slots(
    item: tl.tensor,  # the tile's number: groups first, then tiles
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
    num_groups = tl.load(packet_ptr + NUM_GROUPS)
    group = item % num_groups
    token = item // num_groups * TILE + tl.arange(0, TILE)
    row = _row_of_token(token, packet_ptr, query_start_ptr, SEARCH_STEPS)
    is_real = row >= 0
    positions_ptr += tl.load(packet_ptr + POSITIONS_AT)
    position = tl.load(positions_ptr + token, mask=is_real, other=-1)
    is_real &= (position >= 0) & (position <= LAST_POSITION)
    position = tl.where(is_real, position, 0).to(tl.int32)

    group_ptr = groups_ptr + group * GROUP_INTS
    is_ours, local = locate_local(
        position,
        tl.load(group_ptr + SHARDS_AT).to(tl.int32),
        tl.load(group_ptr + RANK_AT).to(tl.int32),
        tl.load(group_ptr + INTERLEAVE_AT).to(tl.int32),
    )
    block_size = tl.load(group_ptr + BLOCK_SIZE).to(tl.int32)
    block = local // block_size * tl.load(group_ptr + ADVANCES).to(tl.int32)
    is_ours &= is_real & (block < tl.load(group_ptr + SLOT_BLOCKS).to(tl.int32))

    # a row without an edit keeps everything it holds
    edit = tl.load(packet_ptr + EDIT_OF_ROW + row, mask=is_ours, other=0)
    is_edited = edit > 0
    field_ptr = packet_ptr + tl.load(packet_ptr + ENTRIES_AT) + FIELDS + group
    field_ptr += (edit - 1) * (FIELDS + NUM_FIELDS * num_groups)
    base = tl.load(field_ptr + BASE * num_groups, mask=is_edited, other=0)
    keep = tl.load(field_ptr + KEEP * num_groups, mask=is_edited, other=LAST_POSITION)
    blocks = tl.load(field_ptr + BLOCKS * num_groups, mask=is_edited, other=0)
    nulled = tl.load(field_ptr + NULLED * num_groups, mask=is_edited, other=0)

    # a block's kernel blocks follow one another: the first column's id is enough
    split = tl.load(group_ptr + SPLIT).to(tl.int32)
    row_ptr = rows_ptr + tl.load(group_ptr + TABLE_AT)
    row_ptr += row.to(tl.int64) * tl.load(group_ptr + WIDTH)
    ids = _ids_after(block * split, row_ptr, packet_ptr, split, base, keep, blocks, nulled, is_ours)
    slot = ids.to(tl.int64) * tl.load(group_ptr + KERNEL_BLOCK_SIZE) + local % block_size
    slot = tl.where(ids == NULL, PAD, slot)
    slots_ptr += tl.load(group_ptr + SLOTS_AT)
    tl.store(slots_ptr + token, slot, mask=token < tl.load(packet_ptr + SLOTS_END))


@jit
def _ids_after(
    column: tl.tensor,  # [tile]
    row_ptr: tl.tensor,  # the row of each, or of all
    packet_ptr: tl.tensor,
    split: tl.tensor,
    base: tl.tensor,  # of each or of all, as are the next three; see RecordField
    keep: tl.tensor,
    blocks: tl.tensor,
    nulled: tl.tensor,
    mask: tl.tensor,  # [tile], where anything is asked
) -> tl.tensor:
    """Return what rows hold in columns after the launch; the null block outside ``mask``.

    A fresh block comes from the packet and becomes kernel blocks here, ``split`` of them.
    """
    block = column // split
    is_live = mask & (block >= nulled)
    is_fresh = is_live & (block >= keep) & (block < blocks)
    old = tl.load(row_ptr + column, mask=is_live & (block < keep), other=NULL)
    fresh = tl.load(packet_ptr + base + block, mask=is_fresh, other=NULL)
    return tl.where(is_fresh, kernel_block_id(fresh, column % split, split), old)


@jit
def _row_of_token(
    token: tl.tensor, packet_ptr: tl.tensor, query_start_ptr: tl.tensor, SEARCH_STEPS: tl.constexpr
) -> tl.tensor:
    """Return the row of each token's request, negative where the token is padding."""
    num_requests = tl.load(packet_ptr + NUM_REQUESTS)
    query_start_ptr += tl.load(packet_ptr + QUERY_START_AT)
    num_tokens = tl.load(query_start_ptr + num_requests)
    num_tokens = tl.minimum(num_tokens, tl.load(packet_ptr + MAX_TOKENS))
    is_real = token < num_tokens
    # the last request that starts at or before the token; empty ones start where it ends
    low = tl.zeros_like(token)
    high = low + num_requests - 1
    for _ in tl.static_range(SEARCH_STEPS):
        middle = tl.where(low < high, (low + high + 1) // 2, low)
        start = tl.load(query_start_ptr + middle, mask=is_real, other=0)
        high = tl.where((start > token) & (low < high), middle - 1, high)
        low = tl.where((start <= token) & (low < high), middle, low)
    # starts that the caller has on the device may begin late, be negative or fall
    start = tl.load(query_start_ptr + low, mask=is_real, other=0)
    end = tl.load(query_start_ptr + low + 1, mask=is_real, other=0)
    is_real &= (start >= 0) & (start <= token) & (token < end)
    requests_ptr = packet_ptr + tl.load(packet_ptr + REQUESTS_AT)
    return tl.load(requests_ptr + low, mask=is_real, other=-1)
