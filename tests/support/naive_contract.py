"""A second, naive implementation of the contract: it counts and deals, and knows no formula.

It shares nothing with bt_width on purpose. A block count is found by adding blocks until the
tokens fit, an alignment by adding blocks until the row fits it, and a slot by dealing positions
to ranks in turns, as cards, each rank filling its own memory from the front.
"""

from collections.abc import Sequence
from functools import cache

PAD_SLOT = -1


@cache
def blocks_to_hold(num_tokens: int, tokens_per_block: int) -> int:
    """The fewest blocks that hold the tokens, found by adding one at a time."""
    blocks = 0
    while blocks * tokens_per_block < num_tokens:
        blocks += 1
    return blocks


@cache
def blocks_to_align(num_blocks: int, block_size: int, alignment: int | None) -> int:
    """The fewest blocks, no less than given, whose tokens are a multiple of the alignment."""
    while alignment is not None and num_blocks * block_size % alignment:
        num_blocks += 1
    return num_blocks


def width_of_row(
    max_len: int, block_size: int, kernel_block_size: int, shards: int, alignment: int | None
) -> int:
    """Columns of a row, counted kernel block by kernel block."""
    blocks = blocks_to_align(blocks_to_hold(max_len, block_size * shards), block_size, alignment)
    return len(range(0, blocks * block_size, kernel_block_size))


def deal_positions(num_tokens: int, shards: int, interleave: int) -> list[list[int]]:
    """Positions of each rank, in the order in which the rank stores them."""
    hands: list[list[int]] = [[] for _ in range(shards)]
    rank = 0
    for start in range(0, num_tokens, interleave):
        hands[rank].extend(range(start, min(start + interleave, num_tokens)))
        rank = (rank + 1) % shards
    return hands


def slots_of_rank(hand: Sequence[int], block_size: int, block_ids: Sequence[int]) -> dict[int, int]:
    """Slot of each position of a rank, walking through its blocks one token at a time."""
    slot_of_position: dict[int, int] = {}
    column, offset = 0, 0
    for position in hand:
        slot_of_position[position] = block_ids[column] * block_size + offset
        offset += 1
        if offset == block_size:
            column, offset = column + 1, 0
    return slot_of_position
