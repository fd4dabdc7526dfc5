"""Draft steps: lengths moved on by a token, and the slot of that token. N requests, W columns."""

from __future__ import annotations

import torch

from bt_tables.triton_support import jit, tl
from bt_width import NULL_BLOCK, PAD_SLOT

from ..batch.geometry import RowGeometry
from ..operations import DraftRows
from .launch import device_of, row_constants
from .tokens import local_states, state_slot

# one request a thread, so that only the thread that writes a length has read it
_TILE = 128
_WARPS = 4


def step_drafts(
    geometry: RowGeometry, block_table: torch.Tensor, drafts: DraftRows, step: int
) -> None:
    """Launch one program per tile of requests; see ``Operations``."""
    num_reqs = drafts.seq_lens.numel()
    if not num_reqs:
        return
    with device_of(drafts.seq_lens):
        step_drafts_kernel[(-(-num_reqs // _TILE),)](
            block_table_ptr=block_table,
            block_table_row_stride=block_table.stride(0),
            seq_lens_ptr=drafts.seq_lens,
            local_lens_ptr=drafts.local_lens,
            positions_ptr=drafts.positions,
            slot_mapping_ptr=drafts.slot_mapping,
            N=num_reqs,
            W=geometry.width,
            step=step,
            max_len=geometry.max_len,
            NULL_BLOCK=NULL_BLOCK,
            PAD_SLOT=PAD_SLOT,
            KERNEL_BLOCK_SIZE=geometry.kernel_block_size,
            RING_SIZE=geometry.ring_size,
            **row_constants(geometry),
            TILE=_TILE,
            num_warps=_WARPS,
        )


@jit(
    any_value=(
        "block_table_ptr",
        "block_table_row_stride",
        "seq_lens_ptr",
        "local_lens_ptr",
        "positions_ptr",
        "slot_mapping_ptr",
        "N",
        "W",
        "step",
        "max_len",
    )
)
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
    max_len: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    KERNEL_BLOCK_SIZE: tl.constexpr,
    RING_SIZE: tl.constexpr,
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
    lens = tl.minimum(moved, max_len).to(tl.int32)
    positions = lens - 1
    has_slot = (positions >= 0) & (moved <= max_len)

    place = tl.maximum(positions, 0)
    if RING_SIZE > 0:
        local = place % RING_SIZE
    else:
        turns = place // (SHARDS * INTERLEAVE)
        rest = place - turns * (SHARDS * INTERLEAVE)
        has_slot = has_slot & (rest // INTERLEAVE == RANK)
        local = turns * INTERLEAVE + rest % INTERLEAVE
    columns = local // KERNEL_BLOCK_SIZE
    has_slot = has_slot & (columns < W)
    source = block_table_ptr + reqs.to(tl.int64) * block_table_row_stride + columns
    ids = tl.load(source, mask=has_slot, other=NULL_BLOCK).to(tl.int64)
    slots = ids * KERNEL_BLOCK_SIZE + local % KERNEL_BLOCK_SIZE
    slots = tl.where(ids != NULL_BLOCK, slots, PAD_SLOT)

    local_lens = local_states(lens, TOKENS_PER_STATE, SHARDS, RANK, INTERLEAVE)
    positions = positions.to(tl.int64)
    slots = state_slot(positions, slots, TOKENS_PER_STATE, PAD_SLOT)
    tl.store(seq_lens_ptr + reqs, lens, mask=inside)
    tl.store(local_lens_ptr + reqs, local_lens, mask=inside)
    tl.store(positions_ptr + reqs, positions, mask=inside)
    tl.store(slot_mapping_ptr + reqs, slots, mask=inside)
