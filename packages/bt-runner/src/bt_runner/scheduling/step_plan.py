"""A step, planned: which requests compute what, and how their rows change; it knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from bt_runner.scheduling.request import Request
from bt_runner.scheduling.rows import NullPrefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A request's part of a step.

    Attributes:
        request: The request.
        row: Its line in the tables.
        start: Position of the first token computed.
        num_known: Tokens of the request that are computed; the last of them may still be
            on its way when the step is planned.
        drafts: Guesses that are computed after them.
        num_choices: Last positions whose logits are wanted: none in the midst of a prompt.
        is_prefilling: Whether the request has no state yet, or lacks known tokens.
        new_block_ids: What its row gains, group by group.
    """

    request: Request
    row: int
    start: int
    num_known: int
    drafts: list[int]
    num_choices: int
    is_prefilling: bool
    new_block_ids: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """Tokens computed, drafts included."""
        return self.num_known + len(self.drafts)

    @property
    def seq_len(self) -> int:
        """Tokens of the request after the step, drafts included."""
        return self.start + self.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """What is computed, once all of it is known: the request's own tokens, then drafts."""
        return self.request.tokens[self.start : self.start + self.num_known] + self.drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A step, before anything of it is on the device.

    The rows change in the order of the fields.

    Attributes:
        null_prefixes: Columns that lost their blocks since the last step.
        cleared_rows: Rows that lost their request since the last step.
        scheduled: The batch: requests that decode, then those that prefill.
        num_preempted: Requests that gave up their blocks for this step.
    """

    null_prefixes: list[NullPrefix]
    cleared_rows: list[int]
    scheduled: list[Scheduled]
    num_preempted: int
