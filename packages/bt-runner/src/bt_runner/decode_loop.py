"""Launch a step, stage the next while the device computes it, then account for its tokens."""

from __future__ import annotations

from typing import NamedTuple

from bt_runner.arguments import as_tokens
from bt_runner.drafters import Drafter
from bt_runner.errors import RunnerError
from bt_runner.execution.clock import HostClock
from bt_runner.execution.model_runner import ModelRunner
from bt_runner.scheduling.request import FinishReason, Request
from bt_runner.scheduling.rows import RequestRows
from bt_runner.scheduling.scheduler import Scheduler
from bt_runner.scheduling.step_plan import Scheduled


class StepOutput(NamedTuple):
    """What one step gave one request.

    Attributes:
        request_id: The request.
        new_tokens: Tokens chosen for it.
        finish_reason: Why it ended, or None.
    """

    request_id: str
    new_tokens: list[int]
    finish_reason: FinishReason | None


class DecodeLoop:
    """Computes the scheduler's requests, step by step.

    Attributes:
        num_steps: Steps launched.
        clock: How long the host has worked on them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        rows: RequestRows,
        drafter: Drafter | None,
        max_drafts: int,
    ) -> None:
        """Start before the first step.

        Args:
            runner: Runs them on the device.
            scheduler: Says what each computes.
            rows: Who holds which blocks; the scheduler's.
            drafter: What guesses tokens ahead.
            max_drafts: How many of a request in a step.
        """
        self._runner = runner
        self._scheduler = scheduler
        self._rows = rows
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._staged: list[Scheduled] = []
        self.num_steps = 0
        self.clock = HostClock()

    def step(self) -> list[StepOutput]:
        """Compute one batch and choose tokens for those of its requests that are due one.

        Where it raises, its requests start over in the next step, with the tokens they have;
        those it had chosen by then are in the requests, and in no output.
        """
        with self.clock.running():
            self._propose_drafts()
            try:
                # who has ended, was aborted or starts over has given up the row it was staged in
                scheduled = [part for part in self._staged if part.request.row == part.row]
                outputs = self._run(scheduled or self._stage_next())
                self._rows.complete(self.num_steps)
            except BaseException:
                self._start_over()
                raise
            return outputs

    def abort(self, request: Request) -> None:
        """End a request early and give its blocks back."""
        request.finish_reason = FinishReason.ABORTED
        try:
            self._scheduler.finish(request, self.num_steps)
        except BaseException:
            self._start_over()
            raise

    def _start_over(self) -> None:
        """Trust nothing that was under way: Ctrl-C comes between any two instructions."""
        self._scheduler.start_over(self.num_steps)
        self._runner.preparation.forget_tables()
        self._rows.complete(self.num_steps)

    def _propose_drafts(self) -> None:
        """Ask for what may follow each request that decodes; here an error costs no token."""
        if self._drafter is None:
            return
        for request in self._scheduler.running:
            if not (request.is_prefilling or request.drafts):
                proposed = self._drafter.propose(request.tokens, self._max_drafts)
                drafts = as_tokens("what the drafter proposes", proposed, self._runner.vocab_size)
                request.drafts = drafts[: self._max_drafts]

    def _stage_next(self) -> list[Scheduled]:
        """Plan a step and stage what it changes in the tables; return its batch."""
        plan = self._scheduler.schedule(last_step=self.num_steps)
        self._runner.preparation.stage(plan)
        return plan.scheduled

    def _run(self, scheduled: list[Scheduled]) -> list[StepOutput]:
        if not scheduled:
            if self._scheduler.requests:
                raise RunnerError("no request can be computed, and none is under way")
            return []
        self.num_steps += 1
        under_way = self._runner.launch(self.num_steps, scheduled)
        for part in scheduled:
            self._scheduler.launch(part, self.num_steps)
        # what is drafted depends on the tokens, and how far a request gets on the drafts
        self._staged = [] if self._drafter is not None else self._stage_next()
        with self.clock.paused():
            kept = self._runner.wait(under_way)
        self._runner.settle(under_way, kept)
        outputs = []
        for part, tokens in zip(scheduled, kept, strict=True):
            if tokens:
                outputs.append(self._account(part, tokens))
        return outputs

    def _account(self, part: Scheduled, kept: list[int]) -> StepOutput:
        """Take a request's tokens, then end it or move it on by its agreed drafts."""
        request = part.request
        taken = request.accept(kept)
        if request.finish_reason is not None:
            self._scheduler.finish(request, self.num_steps)
        elif part.drafts:
            num_computed = part.start + part.num_known + len(kept) - 1
            self._scheduler.advance(request, num_computed, self.num_steps)
        request.drafts = []
        return StepOutput(request.request_id, taken, request.finish_reason)
