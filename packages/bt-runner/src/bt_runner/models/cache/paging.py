"""Reading and writing a paged cache: through rows, at slots, or many requests in a line.

B and N rows, W columns, S tokens of a row, D numbers of a state; a kernel block holds
``kernel_block_size`` of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bt_width import NULL_BLOCK


def read_rows(cache: Tensor, block_table: Tensor, num_tokens: int) -> Tensor:
    """Return ``[B, S, D]``: each row's first tokens, with S at least ``num_tokens``.

    Args:
        cache: ``[kernel blocks, kernel_block_size, D]``.
        block_table: ``[B, W]``.
        num_tokens: The most tokens that are wanted of a row.
    """
    num_columns = -(-num_tokens // cache.shape[1])
    blocks = cache[block_table[:, :num_columns]]
    return blocks.flatten(1, 2)


def read_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Return ``[..., D]`` for ``slots`` [...]; where a slot is padding, the null block's row."""
    return cache.flatten(0, 1)[slots.clamp(min=NULL_BLOCK)]


def slots_at(
    block_table: Tensor, rows: Tensor, positions: Tensor, kernel_block_size: int
) -> Tensor:
    """Return where local ``positions`` of ``rows`` lie; anything where a position is negative.

    Args:
        block_table: ``[N, W]``.
        rows: The table row of each position, broadcast against them.
        positions: Places on this rank, int64.
        kernel_block_size: Tokens of a column.
    """
    places = positions.clamp(min=0)
    columns = places // kernel_block_size
    blocks = block_table[rows, columns].to(torch.int64)
    return blocks * kernel_block_size + places % kernel_block_size


def read_line(
    cache: Tensor, block_table: Tensor, starts: Tensor, num_tokens: int, skipped: Tensor
) -> Tensor:
    """Return ``[num_tokens, D]``: a span of each row's tokens, one after the other.

    Args:
        cache: ``[kernel blocks, kernel_block_size, D]``.
        block_table: ``[B, W]``.
        starts: ``[B + 1]``, where each span begins; past the last of them the result
            is undefined and must not be read.
        num_tokens: The length of the line, at least ``starts[-1]``.
        skipped: ``[B]``, tokens of each row before its span.
    """
    places = torch.arange(num_tokens, device=cache.device)
    rows = torch.searchsorted(starts[1:].contiguous(), places, right=True)
    rows = rows.clamp(max=block_table.shape[0] - 1)
    positions = places - starts[rows] + skipped[rows]
    width = block_table.shape[1] * cache.shape[1]
    slots = slots_at(block_table, rows, positions.clamp(max=width - 1), cache.shape[1])
    return cache.flatten(0, 1)[slots]


def write(cache: Tensor, places: Tensor, values: Tensor) -> None:
    """Write to places of a cache; where one is padding or null, nothing changes.

    Place 0 belongs to the null block: whatever is not to be kept is written there, and what
    was there comes back. Shapes do not depend on values, and nothing is read by the host.

    Args:
        cache: ``[places, ...]``, by block or by slot.
        places: ``[B]``; none twice but those that are padding or null.
        values: ``[B, ...]``.
    """
    null = cache[NULL_BLOCK].clone()
    cache[places.clamp(min=NULL_BLOCK)] = values.to(cache.dtype)
    cache[NULL_BLOCK] = null
