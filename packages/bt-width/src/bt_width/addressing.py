"""A layout's numbers as kernels take them: plain ints, computed once for each layout."""

from __future__ import annotations

from typing import NamedTuple

from .width import BlockTableWidth


class Addressing(NamedTuple):
    """All that is needed to address a row of one cache group.

    A rule that a kind of group does not have is a number that is never reached.

    Attributes:
        block_size: Tokens of a block on one rank.
        kernel_block_size: Tokens of a kernel block, which is what a column holds.
        kernel_blocks_per_block: Columns that a block takes.
        width: Columns of a row (W).
        blocks_per_row: Blocks that a row has room for, those of the alignment included.
        max_block_id: The last block id whose kernel-block ids are int32.
        shards: Ranks among which a request's tokens are spread; 1 where each keeps all.
        rank: This rank among them; 0 where ``shards`` is 1.
        interleave: Consecutive tokens that stay on one rank; 1 where ``shards`` is 1.
        advances: 1 where later tokens lie in later blocks; 0 for a ring and for states.
        slot_blocks: Blocks of a row that have slots: all, the one of a ring, or 0.
        tokens_per_state_column: Tokens after which a recurrent state moves on a column;
            ``MAX_POSITION`` where it never does.
        states_per_step: Columns of states that a step writes; 0 where a row holds tokens.
        visible_tokens: Computed tokens that a step reads; ``MAX_POSITION`` where it is all.
        max_model_len: Tokens of the longest request.
        max_tokens: The same with its lookahead.
    """

    block_size: int
    kernel_block_size: int
    kernel_blocks_per_block: int
    width: BlockTableWidth
    blocks_per_row: int
    max_block_id: int
    shards: int
    rank: int
    interleave: int
    advances: int
    slot_blocks: int
    tokens_per_state_column: int
    states_per_step: int
    visible_tokens: int
    max_model_len: int
    max_tokens: int
