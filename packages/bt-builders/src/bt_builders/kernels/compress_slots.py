"""Token slots to slots of compressed states. T tokens."""

from __future__ import annotations

import torch

from bt_tables.triton_support import jit, tl
from bt_width import PAD_SLOT

from ..batch.geometry import RowGeometry
from .launch import device_of
from .tokens import state_slot

_TILE = 256


def compress_slots(
    geometry: RowGeometry,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Launch one program per tile of tokens; see ``Operations``."""
    num_tokens = out.numel()
    if not num_tokens:
        return
    with device_of(out):
        compress_slots_kernel[(-(-num_tokens // _TILE),)](
            positions_ptr=positions,
            slot_mapping_ptr=slot_mapping,
            out_ptr=out,
            T=num_tokens,
            PAD_SLOT=PAD_SLOT,
            TOKENS_PER_STATE=geometry.tokens_per_state,
            TILE=_TILE,
        )


@jit(any_value=("positions_ptr", "slot_mapping_ptr", "out_ptr", "T"))
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
