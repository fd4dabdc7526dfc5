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
from .columns import write_columns
from .slots import map_slots


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


@jit(
    any_value=(
        "packet_ptr",
        "groups_ptr",
        "rows_ptr",
        "batch_ptr",
        "slots_ptr",
        "query_start_ptr",
        "positions_ptr",
    )
)
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
        map_slots(
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
        write_columns(
            program - token_programs, packet_ptr, groups_ptr, rows_ptr, batch_ptr, COLUMN_TILE
        )
