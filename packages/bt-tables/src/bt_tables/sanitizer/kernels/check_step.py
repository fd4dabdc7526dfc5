"""One launch that says which groups of a step are at fault, and in which kind of check.

It reads the live columns, the columns that may be stale, and the slots, once. What exactly is
wrong, the plain twin says, and only where something is.

R rows, N requests, T tokens, G groups, K checked groups, B blocks of all pools.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...triton_support import jit, tl
from ..step import CheckedStep
from .plan_line import GROUP, NUM_FIELDS
from .row_check import check_row
from .token_check import check_tokens

ROW_CHECKS = tl.constexpr(0)
COLUMN_CHECKS = tl.constexpr(1)
OWNER_CHECKS = tl.constexpr(2)
SLOT_CHECKS = tl.constexpr(3)
NUM_CHECKS = tl.constexpr(4)

_COLUMN_TILE = 512
_TOKEN_TILE = 128


class Scratch(NamedTuple):
    """What launches leave behind on the device.

    Attributes:
        marks: [G, R] int32, columns below which a row of a table may hold ids.
        claims: [B] int64, who counted a block: the launch, the writers, the claims.
        found: [G, NUM_CHECKS] int64, the last launch that found a fault.
    """

    marks: torch.Tensor
    claims: torch.Tensor
    found: torch.Tensor

    @classmethod
    def make(cls, marks: torch.Tensor, num_blocks: int) -> Scratch:
        """Allocate the rest beside ``marks``, for pools of ``num_blocks`` blocks together."""
        claims = torch.zeros(num_blocks, dtype=torch.int64, device=marks.device)
        found = torch.zeros(
            marks.shape[0], NUM_CHECKS.value, dtype=torch.int64, device=marks.device
        )
        return cls(marks, claims, found)


def launch_check(step: CheckedStep, plans: torch.Tensor, scratch: Scratch, launch: int) -> None:
    """Check a step; ``scratch.found`` holds ``launch`` afterwards where something is wrong.

    Args:
        step: The step, all on one device.
        plans: [K, fields] int64, the lines of the step's groups.
        scratch: What earlier launches left.
        launch: The number of the launch, from 1 and rising.
    """
    num_rows = max(step.query_start_loc.shape[0] - 1, 1)
    num_rows = max([num_rows, *(group.table.shape[0] for group in step.groups)])
    num_slots = [group.slots.shape[0] for group in step.groups]
    num_tiles = -(-max(num_slots) // _TOKEN_TILE)
    num_blocks = step.num_blocks_of_row
    check_step_kernel[(len(step.groups) * (num_rows + num_tiles),)](
        plans_ptr=plans,
        seq_lens_ptr=step.seq_lens,
        starts_ptr=step.query_start_loc,
        num_blocks_ptr=num_blocks,
        num_blocks_row_stride=num_blocks.stride(0),
        num_blocks_group_stride=num_blocks.stride(1),
        marks_ptr=scratch.marks,
        marks_group_stride=scratch.marks.stride(0),
        claims_ptr=scratch.claims,
        found_ptr=scratch.found,
        num_reqs=step.num_reqs,
        num_rows=num_rows,
        num_starts=step.query_start_loc.shape[0],
        num_slots=min(num_slots),
        num_tiles=num_tiles,
        launch=launch,
        HAS_REFS=step.groups[0].ref_counts is not None,
        SEARCH_STEPS=scratch.marks.shape[1].bit_length(),
        COLUMN_TILE=_COLUMN_TILE,
        TOKEN_TILE=_TOKEN_TILE,
    )


@jit(
    any_value=(
        "plans_ptr",
        "seq_lens_ptr",
        "starts_ptr",
        "num_blocks_ptr",
        "num_blocks_row_stride",
        "num_blocks_group_stride",
        "num_reqs",
        "num_rows",
        "num_starts",
        "num_slots",
        "num_tiles",
        "launch",
    )
)
def check_step_kernel(
    plans_ptr: tl.tensor,  # [K, NUM_FIELDS] int64
    seq_lens_ptr: tl.tensor,  # [N] int32 or int64
    starts_ptr: tl.tensor,  # [num_starts] int32 or int64
    num_blocks_ptr: tl.tensor,  # [N, G] int32 or int64
    num_blocks_row_stride: tl.tensor,
    num_blocks_group_stride: tl.tensor,
    marks_ptr: tl.tensor,  # [G, R] int32
    marks_group_stride: tl.tensor,
    claims_ptr: tl.tensor,  # [B] int64
    found_ptr: tl.tensor,  # [G, NUM_CHECKS] int64
    num_reqs: tl.tensor,
    num_rows: tl.tensor,
    num_starts: tl.tensor,
    num_slots: tl.tensor,  # the fewest of a group
    num_tiles: tl.tensor,
    launch: tl.tensor,
    HAS_REFS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
) -> None:
    """Give each program one row or one tile of tokens of one group."""
    part = tl.program_id(0) % (num_rows + num_tiles)
    plan_ptr = plans_ptr + tl.program_id(0) // (num_rows + num_tiles) * NUM_FIELDS
    group = tl.load(plan_ptr + GROUP)
    found = found_ptr + group * NUM_CHECKS
    stamp = tl.cast(launch, tl.int64)
    if part < num_rows:
        num_blocks = num_blocks_ptr + group * num_blocks_group_stride
        marks = marks_ptr + group * marks_group_stride
        bad_row, bad_columns, bad_owners = check_row(
            plan_ptr,
            seq_lens_ptr,
            starts_ptr,
            num_blocks + part.to(tl.int64) * num_blocks_row_stride,
            marks + part,
            claims_ptr,
            part,
            num_reqs,
            num_starts,
            num_slots,
            stamp,
            HAS_REFS,
            COLUMN_TILE,
        )
        tl.store(found + ROW_CHECKS, stamp, mask=bad_row != 0)
        tl.store(found + COLUMN_CHECKS, stamp, mask=bad_columns != 0)
        tl.store(found + OWNER_CHECKS, stamp, mask=bad_owners != 0)
    else:
        token = (part - num_rows) * TOKEN_TILE + tl.arange(0, TOKEN_TILE)
        bad_slots = check_tokens(plan_ptr, seq_lens_ptr, starts_ptr, token, num_reqs, SEARCH_STEPS)
        tl.store(found + SLOT_CHECKS, stamp, mask=bad_slots != 0)
