"""What the sanitizer needs of a layout, as integers that a kernel can load."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bt_width import MAX_POSITION, BlockTableLayout, MambaSpec, SlidingWindowSpec, UniformSpec

LINE = 32
"""Columns that are read together: a cache line of ids."""

NEVER = MAX_POSITION + 1
"""A distance in tokens that no request reaches."""


class GroupPlan(NamedTuple):
    """One group's layout and pool.

    Attributes:
        width: Columns of a row.
        split: Columns that a block takes.
        kernel_block_size: Tokens of a column.
        shards: Ranks that share a request's tokens; 1 where each keeps all.
        interleave: Consecutive tokens that stay on one rank.
        rank: This rank among them.
        keeps_state: 1 where the row holds states (Mamba, rings), 0 where it holds tokens.
        has_slots: 1 where a token has a slot.
        visible_tokens: Computed tokens that a step reads.
        tokens_per_state: Tokens after which a row of states moves on a column.
        states: Columns that a step writes in a row of states.
        num_blocks: Blocks of the pool, the null block included.
        max_tokens: Tokens of the longest request, its lookahead included.
    """

    width: int
    split: int
    kernel_block_size: int
    shards: int
    interleave: int
    rank: int
    keeps_state: int
    has_slots: int
    visible_tokens: int
    tokens_per_state: int
    states: int
    num_blocks: int
    max_tokens: int

    @classmethod
    def of(cls, layout: BlockTableLayout, num_blocks: int) -> GroupPlan:
        """Read a layout; a rule that a kind does not have gets a distance never reached."""
        spec = layout.spec.members[0][1] if isinstance(layout.spec, UniformSpec) else layout.spec
        context = layout.limits.context_parallel
        visible_tokens, tokens_per_state, states = NEVER, NEVER, 1
        if isinstance(spec, SlidingWindowSpec):
            visible_tokens = spec.window - 1 + spec.extra_retained_tokens
        if isinstance(spec, MambaSpec):
            states = 1 + spec.num_speculative_blocks
            if spec.mode == "align":
                tokens_per_state = spec.block_size
        is_sharded = layout.shards > 1
        return cls(
            width=layout.width,
            split=layout.kernel_blocks_per_block,
            kernel_block_size=layout.kernel_block_size,
            shards=layout.shards,
            interleave=context.interleave if is_sharded else 1,
            rank=context.rank if is_sharded else 0,
            keeps_state=int(layout.slot_mode != "block"),
            has_slots=int(layout.slot_mode != "none"),
            visible_tokens=visible_tokens,
            tokens_per_state=tokens_per_state,
            states=states,
            num_blocks=num_blocks,
            max_tokens=min(layout.limits.max_tokens, NEVER),
        )

    def local_length(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return how many of the first ``lengths`` tokens this rank keeps."""
        turn = self.shards * self.interleave
        rest = lengths % turn - self.rank * self.interleave
        return lengths // turn * self.interleave + rest.clamp(0, self.interleave)


class Reach(NamedTuple):
    """The columns that a step touches in each row: ``[read_from, read_to)`` and the same of writes.

    All are [R] int64; a range is empty where its ends are equal.
    """

    read_from: torch.Tensor
    read_to: torch.Tensor
    write_from: torch.Tensor
    write_to: torch.Tensor

    @property
    def end(self) -> torch.Tensor:
        """The first column past everything that is touched."""
        return torch.maximum(self.read_to, self.write_to)


def reach_of(plan: GroupPlan, computed: torch.Tensor, lengths: torch.Tensor) -> Reach:
    """Return what a step touches that takes requests from ``computed`` to ``lengths`` tokens.

    A row of states is read where the last step wrote, and written where this one ends.
    A row of tokens is read as far back as a query sees, and written where tokens are new.
    """
    if plan.keeps_state:
        read_from = (computed - 1).clamp(min=0) // plan.tokens_per_state
        write_from = (lengths - 1).clamp(min=0) // plan.tokens_per_state
        return Reach(
            read_from,
            read_from + (computed > 0).long(),
            write_from,
            write_from + (lengths > computed).long() * plan.states,
        )
    size = plan.kernel_block_size
    before, after = plan.local_length(computed), plan.local_length(lengths)
    read_to = -(-after // size)
    read_from = torch.minimum((computed - plan.visible_tokens).clamp(min=0) // size, read_to)
    write_from = torch.minimum(before // size, read_to)
    return Reach(read_from, read_to, write_from, torch.where(after > before, read_to, write_from))
