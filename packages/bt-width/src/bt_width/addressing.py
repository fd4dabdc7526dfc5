"""A layout's numbers as kernels take them, and the arithmetic that addresses a row by them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .width import NULL_BLOCK, BlockTableWidth


class Location(NamedTuple):
    """Where a position lies.

    Attributes:
        rank: The context-parallel rank that keeps it.
        column: The kernel-block column in that rank's row.
        offset: Tokens from the start of that kernel block.
    """

    rank: int
    column: int
    offset: int


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

    def locate(self, position: int) -> Location:
        """Return where ``position`` (0 or more) lies in a group that has slots.

        Runs of ``interleave`` positions go to the ranks in turn, and each rank packs its
        own into its blocks. Past the row it is the column that the position would have.
        """
        run, offset = divmod(position, self.interleave)
        turn, rank = divmod(run, self.shards)
        local = turn * self.interleave + offset
        if not self.advances:
            local %= self.block_size
        return Location(rank, *divmod(local, self.kernel_block_size))

    def local_length(self, seq_len: int, rank: int | None = None) -> int:
        """Return how many of the first ``seq_len`` positions ``rank`` (this one) keeps."""
        turns, rest = divmod(seq_len, self.shards * self.interleave)
        first = (self.rank if rank is None else rank) * self.interleave
        return turns * self.interleave + min(max(rest - first, 0), self.interleave)

    def expand(self, block_ids: Iterable[int]) -> list[int]:
        """Return the kernel-block ids of block ids; a null block gives null columns."""
        split = self.kernel_blocks_per_block
        return [
            block_id * split + part if block_id != NULL_BLOCK else NULL_BLOCK
            for block_id in block_ids
            for part in range(split)
        ]
