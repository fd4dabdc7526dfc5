"""One request: its tokens, how many of them are computed, and the blocks it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from bt_runner.arguments import require_int, require_kind
from bt_runner.errors import BadInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    Attributes:
        max_new_tokens: Tokens after which it ends.
        temperature: 0 is greedy; above, tokens are drawn.
        seed: Of the draws; equal seeds give equal tokens, whatever else is in the batch.
        stop_tokens: Tokens that end it; the token itself is kept.
    """

    max_new_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Check each field; how many new tokens a request may want, the engine says."""
        require_int("max_new_tokens", self.max_new_tokens)
        require_int("seed", self.seed)
        require_kind("stop_tokens", self.stop_tokens, frozenset)
        is_number = isinstance(self.temperature, int | float)
        if not (is_number and math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadInputError(
                f"temperature must be a number of at least 0, not {self.temperature!r}",
                argument="temperature",
                value=self.temperature,
            )


class FinishReason(Enum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Request:
    """A request, from its arrival to its end.

    Attributes:
        request_id: Its name.
        prompt_len: Tokens it came with.
        params: How it is sampled.
        tokens: The prompt and all tokens chosen since.
        num_computed: Leading tokens whose cached state is valid, or will be when the step
            under way ends.
        num_pending: Tokens that the step under way chooses for sure, 0 or 1.
        drafts: Guesses at the tokens that follow, to be verified in the next step.
        num_accepted: Tokens of the last step that were kept, 1 without drafts.
        row: Its line in the tables while it runs.
        block_ids: What its row holds, group by group.
        finish_reason: Why it ended, None while it has not.
        num_preemptions: How often its blocks were taken away.
    """

    request_id: str
    prompt_len: int
    params: SamplingParams
    tokens: list[int]
    num_computed: int = 0
    num_pending: int = 0
    drafts: list[int] = field(default_factory=list)
    num_accepted: int = 1
    row: int | None = None
    block_ids: list[list[int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0

    @property
    def output(self) -> list[int]:
        """The tokens chosen so far."""
        return self.tokens[self.prompt_len :]

    @property
    def max_len(self) -> int:
        """Tokens it has at its longest."""
        return self.prompt_len + self.params.max_new_tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens that are not computed yet, a pending one included; at least one while it runs."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def is_ending(self) -> bool:
        """Whether the step under way chooses its last token."""
        return self.num_pending > 0 and len(self.tokens) + self.num_pending >= self.max_len

    @property
    def is_prefilling(self) -> bool:
        """Whether it has no state yet, or more than its last token is missing."""
        return self.num_computed == 0 or self.num_to_compute > 1

    def accept(self, tokens: Sequence[int]) -> list[int]:
        """Take chosen tokens up to the one that ends the request; return those taken."""
        self.num_pending = 0
        taken = []
        for token in tokens:
            self.tokens.append(token)
            taken.append(token)
            self.finish_reason = self._reason_to_end()
            if self.finish_reason is not None:
                break
        return taken

    def forget_cache(self) -> None:
        """Return to the state before its first step, with the tokens it has."""
        self.num_computed = 0
        self.num_accepted = 1
        self.drafts = []
        self.row = None
        self.block_ids = []

    def start_over(self) -> None:
        """Forget the step under way, too: no token is pending, and what its tokens end is ended."""
        self.forget_cache()
        self.num_pending = 0
        self.finish_reason = self.finish_reason or self._reason_to_end()

    def _reason_to_end(self) -> FinishReason | None:
        if len(self.tokens) == self.prompt_len:
            return None
        if self.tokens[-1] in self.params.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_len else None
