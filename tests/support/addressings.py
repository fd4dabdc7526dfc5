"""Addressings of any shape for kernels' tests: some that no plan would give, too."""

from __future__ import annotations

from typing import NamedTuple

from bt_width import Addressing, BlockTableWidth

NEVER = 2**31 - 1


class Rows(NamedTuple):
    """Rows of tokens, and how many of these share a state."""

    addressing: Addressing
    tokens_per_state: int = 1


def rows(
    width: int,
    kernel_block_size: int,
    tokens_per_state: int,
    shards: int,
    rank: int,
    interleave: int,
    max_tokens: int,
    *,
    is_ring: bool = False,
) -> Rows:
    return Rows(
        _addressing(
            block_size=kernel_block_size,
            width=width,
            shards=shards,
            rank=rank,
            interleave=interleave,
            advances=int(not is_ring),
            slot_blocks=1 if is_ring else width,
            max_tokens=max_tokens,
        ),
        tokens_per_state,
    )


def states(
    width: int, tokens_per_column: int | None, num_states: int, max_tokens: int = 140
) -> Addressing:
    """Rows of recurrent states; None where the state never moves on."""
    return _addressing(
        block_size=tokens_per_column or 16,
        width=width,
        slot_blocks=0,
        advances=0,
        tokens_per_state_column=tokens_per_column or NEVER,
        states_per_step=num_states,
        max_tokens=max_tokens,
    )


def _addressing(*, block_size: int, width: int, max_tokens: int, **others: int) -> Addressing:
    return Addressing(
        block_size=block_size,
        kernel_block_size=block_size,
        kernel_blocks_per_block=1,
        width=BlockTableWidth(width),
        blocks_per_row=width,
        max_block_id=NEVER,
        max_model_len=max_tokens,
        max_tokens=max_tokens,
        visible_tokens=NEVER,
        **{
            "shards": 1,
            "rank": 0,
            "interleave": 1,
            "tokens_per_state_column": NEVER,
            "states_per_step": 0,
            **others,
        },
    )
