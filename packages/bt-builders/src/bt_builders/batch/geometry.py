"""A layout's numbers as kernels take them: computed once, passed to every launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bt_width import BlockTableLayout, InvalidSpecError

from ..arguments import require_layout


class RowGeometry(NamedTuple):
    """How a group's tokens lie in its rows.

    Attributes:
        width: Columns of a row.
        kernel_block_size: Tokens of a column.
        tokens_per_state: Tokens that share one stored state.
        shards: Ranks among which tokens are spread; 1 where every rank keeps all.
        rank: This rank; 0 where ``shards`` is 1.
        interleave: Consecutive tokens on one rank; 1 where ``shards`` is 1.
        ring_size: Tokens of the ring, or 0 where the group has none.
        max_len: The longest request, in tokens; a draft past it has no slot.
    """

    width: int
    kernel_block_size: int
    tokens_per_state: int
    shards: int
    rank: int
    interleave: int
    ring_size: int
    max_len: int

    @classmethod
    def of(cls, layout: BlockTableLayout, tokens_per_state: int = 1) -> RowGeometry:
        """Take the numbers of ``layout``; its cache stores a state per ``tokens_per_state``."""
        context = layout.limits.context_parallel
        sharded = layout.shards > 1
        return cls(
            width=layout.width,
            kernel_block_size=layout.kernel_block_size,
            tokens_per_state=tokens_per_state,
            shards=layout.shards,
            rank=context.rank if sharded else 0,
            interleave=context.interleave if sharded else 1,
            ring_size=layout.block_size if layout.slot_mode == "ring" else 0,
            max_len=layout.limits.max_model_len,
        )

    @property
    def states_per_column(self) -> int:
        """States that one column's kernel block holds."""
        return self.kernel_block_size // self.tokens_per_state

    @property
    def tokens_per_turn(self) -> int:
        """Tokens after which the first rank comes again."""
        return self.shards * self.interleave

    def max_local_states(self, num_tokens: int) -> int:
        """Return the states of ``num_tokens`` tokens on the rank that keeps most of them.

        The same on every rank, so that ranks which plan by it plan alike.
        """
        turns, rest = divmod(num_tokens, self.tokens_per_turn)
        local = turns * self.interleave + min(rest, self.interleave)
        return local // self.tokens_per_state


def local_lengths(seq_lens: torch.Tensor, layout: BlockTableLayout) -> torch.Tensor:
    """Return how many tokens of each length this rank keeps, as ``layout.local_length`` says.

    Args:
        seq_lens: Lengths of any shape, int32, on any device.
        layout: The group's plan.

    Returns:
        A new tensor like ``seq_lens``; ``seq_lens`` itself where nothing is sharded.

    Raises:
        InvalidSpecError: One of them is no such thing.
    """
    require_layout(layout)
    found = seq_lens.dtype if isinstance(seq_lens, torch.Tensor) else type(seq_lens).__name__
    if found != torch.int32:
        raise InvalidSpecError(f"seq_lens must be an int32 tensor, not {found}", value=seq_lens)
    return localise(seq_lens, RowGeometry.of(layout))


def localise(lengths: torch.Tensor, geometry: RowGeometry) -> torch.Tensor:
    """Return the tokens of each length that this rank keeps; ``lengths`` itself if it is all."""
    if geometry.shards == 1:
        return lengths
    turns = lengths // geometry.tokens_per_turn
    rest = lengths - turns * geometry.tokens_per_turn - geometry.rank * geometry.interleave
    return turns * geometry.interleave + rest.clamp_(0, geometry.interleave)
