"""Finds where positions lie in rows, and expands block ids to kernel-block ids, for kernels.

The one form of these sums on a device; ``reference.addressing`` has the same in NumPy and
torch. Where a group is not split, ``shards`` and ``interleave`` are 1 and ``rank`` is 0.
"""

from __future__ import annotations

from bt_width import NULL_BLOCK

from ..triton_support import jit, tl

_NULL = tl.constexpr(NULL_BLOCK)


@jit
def locate_local(
    position: tl.tensor,  # any shape, not negative
    shards: tl.tensor,  # a scalar or a constant, as are the next two
    rank: tl.tensor,
    interleave: tl.tensor,
) -> tl.tensor:
    """Return whether this rank keeps a position, and the position among those it keeps."""
    run = position // interleave
    local = run // shards * interleave + position % interleave
    return run % shards == rank, local


@jit
def local_length(
    length: tl.tensor,  # any shape, not negative
    shards: tl.tensor,  # a scalar or a constant, as are the next two
    rank: tl.tensor,
    interleave: tl.tensor,
) -> tl.tensor:
    """Return how many of ``length`` tokens this rank keeps."""
    per_turn = shards * interleave
    # whole turns over all ranks, then what of the last turn is this rank's
    rest = length % per_turn - rank * interleave
    return length // per_turn * interleave + tl.minimum(tl.maximum(rest, 0), interleave)


@jit
def kernel_block_id(
    block_id: tl.tensor,  # any shape
    part: tl.tensor,  # which kernel block of the block, of that shape
    kernel_blocks_per_block: tl.tensor,  # a scalar or a constant
) -> tl.tensor:
    """Return the id of a block's kernel block; a null block's are null: ``layout.expand``."""
    kernel_id = block_id * kernel_blocks_per_block + part
    return tl.where(block_id == _NULL, _NULL, kernel_id)
