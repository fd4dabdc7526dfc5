"""Counts the tokens of a length that a rank keeps, for tensors and for bounds on the host."""

from __future__ import annotations

import numpy as np
import torch

from bt_tables.reference.addressing import local_lengths as addressed_lengths
from bt_width import Addressing, BlockTableLayout, InvalidSpecError

from ._checks import require_layout


def local_lengths(seq_lens: torch.Tensor, layout: BlockTableLayout) -> torch.Tensor:
    """Return how many tokens of each length this rank keeps, as ``layout.local_length`` says.

    Args:
        seq_lens: Lengths of any shape, int32, on any device.
        layout: The group's plan.

    Returns:
        A new tensor like ``seq_lens``; ``seq_lens`` itself where nothing is sharded.

    Raises:
        InvalidSpecError: An argument has the wrong type or dtype.
    """
    require_layout(layout)
    found = seq_lens.dtype if isinstance(seq_lens, torch.Tensor) else type(seq_lens).__name__
    if found != torch.int32:
        raise InvalidSpecError(f"seq_lens must be an int32 tensor, not {found}", value=seq_lens)
    return localise(seq_lens, layout.addressing)


def localise(lengths: torch.Tensor, addressing: Addressing) -> torch.Tensor:
    """Return the tokens of each length that this rank keeps; ``lengths`` itself if it is all."""
    return lengths if addressing.shards == 1 else addressed_lengths(addressing, lengths)


def local_lengths_of_ranks(seq_lens: torch.Tensor, layout: BlockTableLayout) -> torch.Tensor:
    """Return how many tokens of each length every rank keeps: a row for each rank.

    Args:
        seq_lens: [N] int32, on any device.
        layout: The group's plan on any rank.

    Returns:
        [shards, N] int32; one row where nothing is sharded.

    Raises:
        InvalidSpecError: An argument has the wrong type or dtype.
    """
    local_lengths(seq_lens, layout)
    addressing = layout.addressing
    ranks = range(addressing.shards)
    return torch.stack([addressed_lengths(addressing, seq_lens, rank) for rank in ranks])


def most_local_states(addressing: Addressing, tokens_per_state: int, num_tokens: int) -> int:
    """Return the states of ``num_tokens`` tokens on the rank that keeps most of them.

    The same on every rank, so that ranks which plan by it plan alike.
    """
    if addressing.shards == 1:
        return num_tokens // tokens_per_state
    # the first rank's turn comes first, so that none has more
    return int(addressed_lengths(addressing, np.asarray(num_tokens), 0)) // tokens_per_state
