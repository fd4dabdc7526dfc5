"""How a sharded cache's positions are spread over ranks, and what ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bt_runner.errors import BadInputError
from bt_width import BlockTableLayout


class Ranks(Protocol):
    """The processes that share a request's cache.

    Attributes:
        size: How many there are.
        rank: This one's place among them.
    """

    size: int
    rank: int

    def gather(self, values: Tensor) -> Tensor:
        """Return every rank's values, ``[size, ...]``; shapes and dtypes are equal."""

    def gather_texts(self, text: str) -> list[str]:
        """Return every rank's text."""


class SingleRank:
    """One process that keeps everything."""

    size = 1
    rank = 0

    def gather(self, values: Tensor) -> Tensor:
        """Return the only values there are."""
        return values[None]

    def gather_texts(self, text: str) -> list[str]:
        """Return the only text there is."""
        return [text]


def require_one_plan(ranks: Ranks, layouts: Sequence[BlockTableLayout]) -> None:
    """Refuse ranks that are not those of the limits, or that planned different tables.

    Raises:
        BadInputError: It holds the derivations of two ranks that differ.
    """
    context = layouts[0].limits.context_parallel
    if (ranks.size, ranks.rank) != (context.size, context.rank):
        raise BadInputError(
            f"the limits are those of rank {context.rank} of {context.size}, and this is rank "
            f"{ranks.rank} of {ranks.size}",
            context_parallel=context,
        )
    digests = ranks.gather_texts("".join(layout.digest() for layout in layouts))
    if len(set(digests)) > 1:
        reasons = ranks.gather_texts("; ".join(layout.explain() for layout in layouts))
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        told = f"rank 0: {reasons[0]} | rank {other}: {reasons[other]}"
        raise BadInputError(f"the ranks planned different tables: {told}", digests=digests)


class PartialAttention(NamedTuple):
    """Attention to some of the visible tokens.

    Attributes:
        values: ``[B, Q, H, R]``, each a weighted mean of the latents seen.
        log_weight: ``[B, Q, H]``, the logarithm of the softmax's denominator; -inf where
            nothing was seen, and there the values are 0.
    """

    values: Tensor
    log_weight: Tensor


def merge(parts: Sequence[PartialAttention]) -> PartialAttention:
    """Merge attention to disjoint sets of tokens into attention to their union."""
    if len(parts) == 1:
        return parts[0]
    log_weights = torch.stack([part.log_weight for part in parts])
    total = log_weights.logsumexp(dim=0)
    anchor = total.masked_fill(total == -torch.inf, 0)
    shares = torch.exp(log_weights - anchor)[..., None]
    values = torch.stack([part.values for part in parts])
    return PartialAttention((values * shares).sum(dim=0), total)


class Place(NamedTuple):
    """Where positions lie.

    Attributes:
        rank: The rank that keeps each.
        local: Its place among those that the rank keeps.
    """

    rank: Tensor
    local: Tensor


class Sharding:
    """Positions spread over ranks in runs of ``interleave``, as ``ContextParallel`` says.

    Attributes:
        ranks: The ranks that share them.
    """

    def __init__(self, ranks: Ranks, interleave: int) -> None:
        """Take the ranks, and how many consecutive positions stay together."""
        self.ranks = ranks
        self._interleave = interleave

    def place(self, positions: Tensor) -> Place:
        """Return where ``positions`` lie; they are not negative."""
        runs = positions // self._interleave
        local = runs // self.ranks.size * self._interleave + positions % self._interleave
        return Place(runs % self.ranks.size, local)

    def in_order(self, scores: Tensor, num_positions: int, starts: Tensor | None = None) -> Tensor:
        """Return all ranks' scores by position, ``[B, num_positions]``.

        Args:
            scores: ``[B, S]``, of what this rank keeps, -inf where nothing is seen; S is
                equal on all ranks.
            num_positions: How many are wanted.
            starts: ``[B, 1]``, where this rank's first position lies among S; at 0 without.
        """
        if self.ranks.size == 1 and starts is None:
            return scores[:, :num_positions]
        place = self.place(torch.arange(num_positions, device=scores.device))
        columns = place.local.expand(self.ranks.size, len(scores), num_positions)
        if starts is not None:
            columns = columns + self.ranks.gather(starts.to(torch.int64))
        # one column more, which nothing sees, for positions that a rank does not reach
        padded = F.pad(self.ranks.gather(scores), (0, 1), value=-torch.inf)
        found = padded.gather(2, columns.clamp(max=scores.shape[1]))
        return found.gather(0, place.rank.expand(1, len(scores), num_positions))[0]

    def merge(self, part: PartialAttention) -> PartialAttention:
        """Return attention to what all ranks keep."""
        if self.ranks.size == 1:
            return part
        values = self.ranks.gather(part.values)
        weights = self.ranks.gather(part.log_weight)
        return merge([PartialAttention(*pair) for pair in zip(values, weights, strict=True)])
