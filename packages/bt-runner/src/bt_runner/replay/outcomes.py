"""What becomes of a step where no model says: drafts are right by chance, all else follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bt_runner.replay.sharing.rows import SharedRows
from bt_runner.scheduling.request import Request
from bt_runner.scheduling.scheduler import Scheduler
from bt_runner.scheduling.step_plan import Scheduled, StepPlan


class Outcome(NamedTuple):
    """What a step gave a request.

    Attributes:
        request: The request; it has ended where it has a reason to.
        num_tokens: Tokens it got.
    """

    request: Request
    num_tokens: int


class Outcomes:
    """Draws how many drafts are right, and moves requests on or ends them."""

    def __init__(
        self, scheduler: Scheduler, rows: SharedRows, acceptance: float, seed: int
    ) -> None:
        """Take who is told.

        Args:
            scheduler: Who keeps the requests.
            rows: Who holds which blocks.
            acceptance: The share of drafts that turn out right, each after a right one.
            seed: Of the draws.
        """
        self._scheduler = scheduler
        self._rows = rows
        self._acceptance = acceptance
        self._draw = np.random.default_rng(seed)

    def settle(self, plan: StepPlan, step: int) -> Iterator[Outcome]:
        """Account for a step that was run, request by request."""
        accepted = self._accepted(plan)
        for part, num_accepted in zip(plan.scheduled, accepted, strict=True):
            yield Outcome(part.request, self._settle(part, num_accepted, step))

    def _accepted(self, plan: StepPlan) -> list[int]:
        """Draw how many leading drafts of each request are right."""
        most = max((len(part.drafts) for part in plan.scheduled), default=0)
        right = self._draw.random((len(plan.scheduled), most)) < self._acceptance
        drawn: list[int] = right.cumprod(axis=1).sum(axis=1).tolist()
        return [min(n, len(part.drafts)) for n, part in zip(drawn, plan.scheduled, strict=True)]

    def _settle(self, part: Scheduled, num_accepted: int, step: int) -> int:
        request = part.request
        self._rows.offer(request, part.seq_len)
        if not part.num_choices:
            self._scheduler.advance(request, part.seq_len, step)
            return 0
        taken = request.accept([0] * (1 + num_accepted))
        if request.finish_reason is not None:
            self._scheduler.finish(request, step)
            self._rows.forget(request)
            return len(taken)
        request.num_accepted = 1 + num_accepted
        num_computed = part.seq_len - (len(part.drafts) - num_accepted)
        self._scheduler.advance(request, num_computed, step)
        request.drafts = [0] * self._rows.layouts[0].limits.num_speculative_tokens
        return len(taken)
