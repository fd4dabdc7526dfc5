"""How many columns a row has: the one formula, and the sentinels that pad around it."""

from __future__ import annotations

import math
from typing import NewType

from ._checks import require_int
from .errors import InvalidSpecError

BlockTableWidth = NewType("BlockTableWidth", int)
"""A row's number of columns, in kernel blocks; only this package makes one."""

NULL_BLOCK = 0
"""The block that pads block tables; a pool never hands it out."""

PAD_SLOT = -1
"""The slot that pads slot mappings; a writer skips it."""


def get_block_table_width(
    max_num_blocks: int,
    block_size: int,
    kernel_block_size: int | None = None,
    *,
    token_alignment: int | None = 128,
) -> BlockTableWidth:
    """Return the number of kernel-block columns of a row.

    The block count is rounded up so that ``max_num_blocks * block_size`` is a
    multiple of ``token_alignment``, then multiplied by the kernel blocks of a block.
    The rounding goes through the gcd, so any block size works, powers of two or not.

    Args:
        max_num_blocks: Blocks that the longest request holds in its row.
        block_size: Tokens of a block.
        kernel_block_size: Tokens of a kernel block; the block itself by default.
        token_alignment: Tokens that a row spans a multiple of, or None for no rounding.

    Raises:
        InvalidSpecError: An argument is not a positive int, or the kernel block does
            not divide the block.
    """
    require_int("max_num_blocks", max_num_blocks, minimum=1)
    require_int("block_size", block_size, minimum=1)
    aligned = max_num_blocks
    if token_alignment is not None:
        require_int("token_alignment", token_alignment, minimum=1)
        unit = token_alignment // math.gcd(token_alignment, block_size)
        aligned = -(-max_num_blocks // unit) * unit
    return BlockTableWidth(aligned * get_kernel_blocks_per_block(block_size, kernel_block_size))


def get_kernel_blocks_per_block(block_size: int, kernel_block_size: int | None) -> int:
    """Return how many kernel blocks a block is split into."""
    if kernel_block_size is None:
        return 1
    require_int("kernel_block_size", kernel_block_size, minimum=1)
    kernel_blocks, rest = divmod(block_size, kernel_block_size)
    if rest:
        raise InvalidSpecError(
            f"kernel_block_size {kernel_block_size} does not divide block_size {block_size}; "
            f"choose a divisor, for instance {math.gcd(block_size, kernel_block_size)}",
            block_size=block_size,
            kernel_block_size=kernel_block_size,
        )
    return kernel_blocks
