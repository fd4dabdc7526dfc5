"""Kernels over tokens: what each one sees, its copy of a row, its slot.

N requests, T tokens, W columns.

Everything divided here is at least 0, so that a division that truncates also floors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from bt_tables.kernels.addressing import local_length, locate_local
from bt_tables.triton_support import jit, tl
from bt_width import NULL_BLOCK, PAD_SLOT, Addressing

from ..operations import DraftRows, ExpandedRows, TokenLens

_LENS_TILE = 128
_COLUMNS_TILE = 512
_SLOTS_TILE = 256
# one request a thread, so that only the thread that writes a length has read it
_DRAFTS_TILE = 128
_DRAFTS_WARPS = 4


def token_lens(
    addressing: Addressing,
    tokens_per_state: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out: TokenLens,
) -> None:
    """Launch one program per tile of tokens; see ``Operations``."""
    num_reqs, num_tokens = seq_lens.numel(), out.seq_lens.numel()
    if not num_tokens:
        return
    with device_of(out.seq_lens):
        token_lens_kernel[(-(-num_tokens // _LENS_TILE),)](
            query_start_loc_ptr=query_start_loc,
            seq_lens_ptr=seq_lens,
            out_lens_ptr=out.seq_lens,
            out_local_lens_ptr=out.local_lens,
            N=num_reqs,
            T=num_tokens,
            search_steps=num_reqs.bit_length(),
            max_tokens=addressing.max_tokens,
            TOKENS_PER_STATE=tokens_per_state,
            SHARDS=addressing.shards,
            RANK=addressing.rank,
            INTERLEAVE=addressing.interleave,
            TILE=_LENS_TILE,
        )


@jit
def token_lens_kernel(
    query_start_loc_ptr: tl.tensor,  # [N + 1] int32
    seq_lens_ptr: tl.tensor,  # [N] int32
    out_lens_ptr: tl.tensor,  # [T] int32
    out_local_lens_ptr: tl.tensor,  # [T] int32
    N: tl.tensor,
    T: tl.tensor,
    search_steps: tl.tensor,
    max_tokens: tl.tensor,
    TOKENS_PER_STATE: tl.constexpr,
    SHARDS: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write the length of each token, on all ranks and on this one."""
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = tokens < T
    req = request_of_token(query_start_loc_ptr, tokens, N, search_steps)
    lens = token_len(query_start_loc_ptr, seq_lens_ptr, tokens, req, N, max_tokens)
    local = local_length(lens, SHARDS, RANK, INTERLEAVE) // TOKENS_PER_STATE
    tl.store(out_lens_ptr + tokens, lens, mask=inside)
    tl.store(out_local_lens_ptr + tokens, local, mask=inside)


def expand_rows(
    addressing: Addressing,
    tokens_per_state: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    lens: TokenLens,
    rows: ExpandedRows,
) -> None:
    """Launch one program per token; see ``Operations``."""
    num_reqs, num_tokens = seq_lens.numel(), lens.seq_lens.numel()
    if not num_tokens:
        return
    with device_of(rows.table):
        expand_rows_kernel[(num_tokens,)](
            query_start_loc_ptr=query_start_loc,
            seq_lens_ptr=seq_lens,
            block_table_ptr=block_table,
            block_table_row_stride=block_table.stride(0),
            out_lens_ptr=lens.seq_lens,
            out_local_lens_ptr=lens.local_lens,
            out_table_ptr=rows.table,
            out_table_row_stride=rows.table.stride(0),
            num_live_ptr=rows.num_live,
            N=num_reqs,
            W=addressing.width,
            search_steps=num_reqs.bit_length(),
            max_tokens=addressing.max_tokens,
            NULL_BLOCK=NULL_BLOCK,
            STATES_PER_COLUMN=addressing.kernel_block_size // tokens_per_state,
            TOKENS_PER_STATE=tokens_per_state,
            SHARDS=addressing.shards,
            RANK=addressing.rank,
            INTERLEAVE=addressing.interleave,
            TILE=_COLUMNS_TILE,
        )


@jit
def expand_rows_kernel(
    query_start_loc_ptr: tl.tensor,  # [N + 1] int32
    seq_lens_ptr: tl.tensor,  # [N] int32
    block_table_ptr: tl.tensor,  # [N, W] int32
    block_table_row_stride: tl.tensor,
    out_lens_ptr: tl.tensor,  # [T] int32
    out_local_lens_ptr: tl.tensor,  # [T] int32
    out_table_ptr: tl.tensor,  # [T, W] int32
    out_table_row_stride: tl.tensor,
    num_live_ptr: tl.tensor,  # [T] int32
    N: tl.tensor,
    W: tl.tensor,
    search_steps: tl.tensor,
    max_tokens: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    STATES_PER_COLUMN: tl.constexpr,
    TOKENS_PER_STATE: tl.constexpr,
    SHARDS: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write one token's length and row, and null what its row held before."""
    token = tl.program_id(0)
    req = request_of_token(query_start_loc_ptr, token, N, search_steps)
    length = token_len(query_start_loc_ptr, seq_lens_ptr, token, req, N, max_tokens)
    local = local_length(length, SHARDS, RANK, INTERLEAVE) // TOKENS_PER_STATE
    tl.store(out_lens_ptr + token, length)
    tl.store(out_local_lens_ptr + token, local)

    live = tl.minimum((local + STATES_PER_COLUMN - 1) // STATES_PER_COLUMN, W)
    reach = tl.maximum(live, tl.minimum(tl.load(num_live_ptr + token), W))
    # a token without a request has no live column, so that its source is never read
    source = block_table_ptr + req.to(tl.int64) * block_table_row_stride
    target = out_table_ptr + token.to(tl.int64) * out_table_row_stride
    first = 0
    while first < reach:
        columns = first + tl.arange(0, TILE)
        ids = tl.load(source + columns, mask=columns < live, other=NULL_BLOCK)
        tl.store(target + columns, ids, mask=columns < reach)
        first += TILE
    # every thread has to know the old count before one of them overwrites it
    tl.debug_barrier()
    tl.store(num_live_ptr + token, live)


def compress_slots(
    tokens_per_state: int, positions: torch.Tensor, slot_mapping: torch.Tensor, out: torch.Tensor
) -> None:
    """Launch one program per tile of tokens; see ``Operations``."""
    num_tokens = out.numel()
    if not num_tokens:
        return
    with device_of(out):
        compress_slots_kernel[(-(-num_tokens // _SLOTS_TILE),)](
            positions_ptr=positions,
            slot_mapping_ptr=slot_mapping,
            out_ptr=out,
            T=num_tokens,
            PAD_SLOT=PAD_SLOT,
            TOKENS_PER_STATE=tokens_per_state,
            TILE=_SLOTS_TILE,
        )


@jit
def compress_slots_kernel(
    positions_ptr: tl.tensor,  # [T] int64
    slot_mapping_ptr: tl.tensor,  # [T] int64
    out_ptr: tl.tensor,  # [T] int64
    T: tl.tensor,
    PAD_SLOT: tl.constexpr,
    TOKENS_PER_STATE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write the slot of the state that each token completes."""
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = tokens < T
    positions = tl.load(positions_ptr + tokens, mask=inside, other=0)
    slots = tl.load(slot_mapping_ptr + tokens, mask=inside, other=PAD_SLOT)
    tl.store(
        out_ptr + tokens, state_slot(positions, slots, TOKENS_PER_STATE, PAD_SLOT), mask=inside
    )


def step_drafts(
    addressing: Addressing,
    tokens_per_state: int,
    block_table: torch.Tensor,
    drafts: DraftRows,
    step: int,
) -> None:
    """Launch one program per tile of requests; see ``Operations``."""
    num_reqs = drafts.seq_lens.numel()
    if not num_reqs:
        return
    with device_of(drafts.seq_lens):
        step_drafts_kernel[(-(-num_reqs // _DRAFTS_TILE),)](
            block_table_ptr=block_table,
            block_table_row_stride=block_table.stride(0),
            seq_lens_ptr=drafts.seq_lens,
            local_lens_ptr=drafts.local_lens,
            positions_ptr=drafts.positions,
            slot_mapping_ptr=drafts.slot_mapping,
            N=num_reqs,
            W=addressing.width,
            step=step,
            max_tokens=addressing.max_tokens,
            NULL_BLOCK=NULL_BLOCK,
            PAD_SLOT=PAD_SLOT,
            KERNEL_BLOCK_SIZE=addressing.kernel_block_size,
            ADVANCES=addressing.advances,
            TOKENS_PER_STATE=tokens_per_state,
            SHARDS=addressing.shards,
            RANK=addressing.rank,
            INTERLEAVE=addressing.interleave,
            TILE=_DRAFTS_TILE,
            num_warps=_DRAFTS_WARPS,
        )


@jit
def step_drafts_kernel(
    block_table_ptr: tl.tensor,  # [N, W] int32
    block_table_row_stride: tl.tensor,
    seq_lens_ptr: tl.tensor,  # [N] int32
    local_lens_ptr: tl.tensor,  # [N] int32
    positions_ptr: tl.tensor,  # [N] int64
    slot_mapping_ptr: tl.tensor,  # [N] int64
    N: tl.tensor,
    W: tl.tensor,
    step: tl.tensor,
    max_tokens: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    KERNEL_BLOCK_SIZE: tl.constexpr,
    ADVANCES: tl.constexpr,
    TOKENS_PER_STATE: tl.constexpr,
    SHARDS: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Move each request on, clamp its length, and find its last token's slot."""
    reqs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = reqs < N
    old = tl.load(seq_lens_ptr + reqs, mask=inside, other=0).to(tl.int64)
    moved = tl.where(old > 0, old + step, 0)
    lens = tl.minimum(moved, max_tokens).to(tl.int32)
    positions = lens - 1
    has_slot = (positions >= 0) & (moved <= max_tokens)

    is_ours, local = locate_local(tl.maximum(positions, 0), SHARDS, RANK, INTERLEAVE)
    has_slot = has_slot & is_ours
    columns = local // KERNEL_BLOCK_SIZE
    if not ADVANCES:
        # a ring is one block, and not split into kernel blocks
        columns = columns * 0
    has_slot = has_slot & (columns < W)
    source = block_table_ptr + reqs.to(tl.int64) * block_table_row_stride + columns
    ids = tl.load(source, mask=has_slot, other=NULL_BLOCK).to(tl.int64)
    slots = ids * KERNEL_BLOCK_SIZE + local % KERNEL_BLOCK_SIZE
    slots = tl.where(ids != NULL_BLOCK, slots, PAD_SLOT)

    local_lens = local_length(lens, SHARDS, RANK, INTERLEAVE) // TOKENS_PER_STATE
    positions = positions.to(tl.int64)
    slots = state_slot(positions, slots, TOKENS_PER_STATE, PAD_SLOT)
    tl.store(seq_lens_ptr + reqs, lens, mask=inside)
    tl.store(local_lens_ptr + reqs, local_lens, mask=inside)
    tl.store(positions_ptr + reqs, positions, mask=inside)
    tl.store(slot_mapping_ptr + reqs, slots, mask=inside)


@jit
def request_of_token(
    query_start_loc_ptr: tl.tensor,  # [N + 1] int32
    tokens: tl.tensor,  # a scalar or a tile, int32
    N: tl.tensor,
    search_steps: tl.tensor,
) -> tl.tensor:
    """Return the request that each token belongs to; N past the last one's tokens."""
    low = tokens * 0
    high = low + N
    # a `while`, because some interpreters refuse a `range` over a loaded value
    while search_steps > 0:
        middle = (low + high) // 2
        is_open = low < high
        end = tl.load(query_start_loc_ptr + 1 + middle, mask=is_open, other=0)
        ends_before = end <= tokens
        low = tl.where(is_open & ends_before, middle + 1, low)
        high = tl.where(is_open & (end > tokens), middle, high)
        search_steps -= 1
    return low


@jit
def token_len(
    query_start_loc_ptr: tl.tensor,  # [N + 1] int32
    seq_lens_ptr: tl.tensor,  # [N] int32
    tokens: tl.tensor,  # a scalar or a tile, int32
    req: tl.tensor,  # like tokens
    N: tl.tensor,
    max_tokens: tl.tensor,
) -> tl.tensor:
    """Return what each token sees, itself included; 0 past the last request's tokens."""
    is_real = req < N
    end = tl.load(query_start_loc_ptr + req + 1, mask=is_real, other=0)
    seq_len = tl.load(seq_lens_ptr + req, mask=is_real, other=0)
    # lengths and ends are the device's word: no row is read past its last token
    length = seq_len.to(tl.int64) - end + tokens + 1
    length = tl.minimum(tl.maximum(length, 0), max_tokens).to(tl.int32)
    return tl.where(is_real, length, 0)


@jit
def state_slot(
    positions: tl.tensor,  # any shape, int64
    slots: tl.tensor,  # like positions
    TOKENS_PER_STATE: tl.constexpr,
    PAD_SLOT: tl.constexpr,
) -> tl.tensor:
    """Return the slot of the state that each token completes, else ``PAD_SLOT``."""
    completes = (slots >= 0) & (positions >= 0)
    completes = completes & ((tl.maximum(positions, 0) + 1) % TOKENS_PER_STATE == 0)
    return tl.where(completes, tl.maximum(slots, 0) // TOKENS_PER_STATE, PAD_SLOT)


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which the device of ``tensor`` is the current one; on a CPU, none.

    Triton launches on the current device, whatever the tensors'.
    """
    context: AbstractContextManager[object] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return context
