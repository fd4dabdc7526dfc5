"""What a server allows: lengths, batch sizes and shards; it knows nothing of groups."""

from __future__ import annotations

from dataclasses import dataclass, field

from ._checks import require_instance, require_int
from .errors import InvalidSpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """How the tokens of a request are spread over ranks that share its cache.

    The size is stated, never inferred from world sizes: engines disagree on which
    of their parallel groups shard a cache.

    Attributes:
        size: Ranks that share a sharded group's tokens.
        rank: This process's place among them.
        interleave: Consecutive tokens that stay on one rank.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        """Check each field, and that the rank is one of ``size``."""
        require_int("context_parallel.size", self.size, minimum=1)
        require_int("context_parallel.rank", self.rank, minimum=0)
        require_int("context_parallel.interleave", self.interleave, minimum=1)
        if self.rank >= self.size:
            raise InvalidSpecError(
                f"context_parallel.rank {self.rank} must be below its size {self.size}",
                rank=self.rank,
                size=self.size,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """The limits that every layout of a server is planned for.

    Attributes:
        max_model_len: Tokens of the longest request, prompt and output.
        max_num_reqs: Requests of the largest batch.
        max_num_batched_tokens: Tokens of the largest step, drafts included.
        num_speculative_tokens: Draft tokens a request gets in a step.
        lookahead_tokens: Tokens past ``max_model_len`` that a step may still address.
        context_parallel: How sharded groups are spread over ranks.
    """

    max_model_len: int
    max_num_reqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int = 0
    lookahead_tokens: int = 0
    context_parallel: ContextParallel = field(default_factory=ContextParallel)

    def __post_init__(self) -> None:
        """Check each field alone."""
        require_int("max_model_len", self.max_model_len, minimum=1)
        require_int("max_num_reqs", self.max_num_reqs, minimum=1)
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, minimum=1)
        require_int("num_speculative_tokens", self.num_speculative_tokens, minimum=0)
        require_int("lookahead_tokens", self.lookahead_tokens, minimum=0)
        require_instance(
            "context_parallel", self.context_parallel, ContextParallel, wanted="a ContextParallel"
        )

    @property
    def max_tokens(self) -> int:
        """Tokens that a row must hold: the longest request and its lookahead (L)."""
        return self.max_model_len + self.lookahead_tokens
