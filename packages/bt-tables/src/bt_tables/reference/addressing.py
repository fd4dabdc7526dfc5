"""Finds where positions lie in many rows at once: the vectorised form of what a layout computes.

Every function takes NumPy arrays or torch tensors of ints, of any shape, and returns the
same kind. The kernels' form is ``kernels.addressing``; both are tested against the layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from bt_width import NULL_BLOCK, Addressing, InvalidSpecError

Ints = TypeVar("Ints", np.ndarray[Any, np.dtype[Any]], torch.Tensor)


class Places(NamedTuple):
    """Where positions lie, each part of the positions' shape.

    Attributes:
        rank: The rank that keeps a position; the own one where every rank does.
        column: The kernel-block column in that rank's row.
        offset: Tokens from the start of that kernel block.
    """

    rank: Any
    column: Any
    offset: Any


def locate(addressing: Addressing, positions: Ints) -> Places:
    """Return where positions lie; past a row, the column it would be.

    Args:
        addressing: The group's.
        positions: Places of tokens in their requests, not negative.

    Raises:
        InvalidSpecError: The group has no slots.
    """
    if not addressing.slot_blocks:
        raise InvalidSpecError("a group without slots has no place for a position")
    if not addressing.advances:
        # every rank keeps the whole ring
        nothing = positions * 0
        return Places(nothing + addressing.rank, nothing, positions % addressing.block_size)
    rank, local = spread(addressing, positions)
    return Places(rank, *_divided(local, addressing.kernel_block_size))


def spread(addressing: Addressing, positions: Ints) -> tuple[Ints, Ints]:
    """Return the rank that keeps each position, and which of that rank's positions it is.

    Args:
        addressing: The group's; no ring's, of which every rank keeps all.
        positions: Places of tokens in their requests, not negative.
    """
    run, offset = _divided(positions, addressing.interleave)
    turn, rank = _divided(run, addressing.shards)
    return rank, turn * addressing.interleave + offset


def local_lengths(addressing: Addressing, lengths: Ints, rank: int | None = None) -> Ints:
    """Return how many of each request's tokens a rank keeps.

    Args:
        addressing: The group's.
        lengths: Tokens of each request, on all ranks.
        rank: The rank; the own one by default.
    """
    own = addressing.rank if rank is None else rank
    interleave = addressing.interleave
    per_turn = addressing.shards * interleave
    # whole turns over all ranks, then what of the last turn is this rank's
    turns, rest = _divided(lengths, per_turn)
    local: Ints = turns * interleave + (rest - own * interleave).clip(0, interleave)
    return local


def _divided(numbers: Ints, divisor: int) -> tuple[Ints, Ints]:
    """Return what ``divmod`` does, with one division at most: it costs more than the rest."""
    if divisor == 1:
        return numbers, numbers * 0
    quotients = numbers // divisor
    return quotients, numbers - quotients * divisor


def kernel_block_id(addressing: Addressing, block_ids: Ints, part: Ints) -> Ints:
    """Return the ids of kernel blocks; a null block's are null, as ``layout.expand`` says.

    Args:
        addressing: The group's.
        block_ids: The blocks.
        part: Which kernel block of each block; broadcast with ``block_ids``.
    """
    # the null block is 0, and so is each of its kernel blocks
    kernel_ids: Ints = block_ids * addressing.kernel_blocks_per_block + part * (
        block_ids != NULL_BLOCK
    )
    return kernel_ids
