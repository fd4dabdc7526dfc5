"""Random requests over one scenario, on all of its ranks at once, step by step."""

from __future__ import annotations

import random

import torch

from bt_runner.errors import RunnerError
from bt_runner.execution.batch import BatchArrays, BatchBuffers, assemble
from bt_runner.execution.graphs import GraphSize, stand_ins
from bt_runner.replay.outcomes import Outcomes
from bt_runner.replay.sharing.rows import SharedRows
from bt_runner.scheduling.request import FinishReason, Request, SamplingParams
from bt_runner.scheduling.scheduler import Scheduler
from bt_runner.scheduling.step_plan import StepPlan
from bt_runner.soak.counts import Counts
from bt_runner.soak.rank import Rank, setup_of
from bt_runner.soak.scenario import Scenario
from bt_runner.soak.verification import Verification

_MAX_WAITING = 3
_BROKEN = 0.005


class SoakLoop:
    """Serves random requests, and checks every step on every rank.

    Attributes:
        scenario: What is served.
        num_steps: Steps so far.
    """

    def __init__(
        self, scenario: Scenario, device: torch.device, draw: random.Random, counts: Counts
    ) -> None:
        """Start with no request.

        Args:
            scenario: What is served.
            device: Where the tables lie.
            draw: Decides everything that is left to chance.
            counts: What is counted, shared with other loops.
        """
        self.scenario = scenario
        self.num_steps = 0
        self._draw = draw
        self._counts = counts
        self._num_requests = 0
        num_ranks = scenario.limits.context_parallel.size
        setups = [setup_of(scenario, rank, device) for rank in range(num_ranks)]
        layouts = setups[0].layouts
        self._rows = SharedRows(layouts, scenario.num_blocks(layouts))
        self._scheduler = Scheduler(scenario.limits, self._rows)
        self._outcomes = Outcomes(
            self._scheduler, self._rows, scenario.acceptance, draw.randrange(1 << 30)
        )
        self._buffers = BatchBuffers(scenario.limits, device)
        self._ranks = [Rank(setup, self._rows.pools, device, draw) for setup in setups]
        self._verification = Verification(
            scenario.names, [rank.layouts for rank in self._ranks], self._rows, counts
        )

    def run(self, num_steps: int) -> None:
        """Let requests come and go for some steps.

        Raises:
            BlockTableError: The sanitizer, the tables or the builders refused a step.
            VerificationError: A step is not what the contract says.
            RunnerError: Requests wait, and none can be computed.
        """
        for _ in range(num_steps):
            self._let_come()
            self._disturb()
            self._step()

    def drain(self) -> None:
        """Serve those that are left, and see that every block came back.

        Raises:
            BlockTableError: As for ``run``.
            VerificationError: As for ``run``, or a pool lacks a block.
            RunnerError: As for ``run``.
        """
        while self._scheduler.requests:
            self._step()
        self._rows.complete(self.num_steps)
        self._verification.require_all_back()

    def _let_come(self) -> None:
        limits = self.scenario.limits
        while len(self._scheduler.waiting) < _MAX_WAITING and self._draw.random() < 0.5:
            prompt_len = self._draw.randint(1, self._draw.choice([1, 8, 40, limits.max_model_len]))
            num_new = self._draw.randint(1, self._draw.choice([1, 30, 200]))
            total = min(prompt_len + num_new, limits.max_model_len)
            prompt_len = min(prompt_len, total - 1)
            request = Request(
                request_id=str(self._num_requests),
                prompt_len=prompt_len,
                params=SamplingParams(max_new_tokens=total - prompt_len),
                tokens=[0] * prompt_len,
            )
            self._num_requests += 1
            self._scheduler.add(request)
            self._rows.name_prefix(request, ())

    def _disturb(self) -> None:
        """Do now and then what an engine does between two steps."""
        chance = self._draw.random()
        requests = [*self._scheduler.running, *self._scheduler.waiting]
        if chance < 0.02 and requests:
            request = self._draw.choice(requests)
            request.finish_reason = FinishReason.ABORTED
            self._scheduler.finish(request, self.num_steps)
            self._rows.forget(request)
            self._counts.num_aborted += 1
        elif chance < 0.06:
            self._run_dummy_step()
        elif chance < 0.07:
            for rank in self._ranks:
                rank.forget(is_remapped=self._draw.random() < 0.5)

    def _run_dummy_step(self) -> None:
        limits = self.scenario.limits
        query_len = self._draw.choice([1, 1 + limits.num_speculative_tokens])
        most = min(limits.max_num_reqs, limits.max_num_batched_tokens // query_len)
        batch = assemble(
            stand_ins(GraphSize(self._draw.randint(1, most), query_len)), self._buffers
        )
        for rank in self._ranks:
            rank.dummy_step(batch)
        self._counts.num_dummy_steps += 1

    def _step(self) -> None:
        plan = self._scheduler.schedule(last_step=self.num_steps)
        breaks_off = self._draw.random() < _BROKEN
        staging = (
            self._ranks[: self._draw.randrange(len(self._ranks))] if breaks_off else self._ranks
        )
        for rank in staging:
            rank.stage(plan)
        if breaks_off:
            self._start_over()
            return
        if not plan.scheduled:
            self._wait()
            return
        self.num_steps += 1
        batch = self._assemble(plan)
        tables = [rank.step(plan.scheduled, batch) for rank in self._ranks]
        self._verification.check_tokens(plan.scheduled, tables)
        self._verification.check_contract(
            self.num_steps, plan.scheduled, batch, tables, self._scheduler.running
        )
        self._counts.note_step(plan, batch, len(self._ranks))
        for request, _ in self._outcomes.settle(plan, self.num_steps):
            self._counts.num_ended += request.finish_reason is not None
        self._rows.complete(self.num_steps - self.scenario.num_in_flight)

    def _start_over(self) -> None:
        """Recover from an error in the middle of a step, after some ranks had edited their rows."""
        self._scheduler.start_over(self.num_steps)
        for rank in self._ranks:
            rank.forget(is_remapped=False)
        self._rows.complete(self.num_steps)
        self._counts.num_broken_steps += 1

    def _wait(self) -> None:
        if not any(pool.num_cooling for pool in self._rows.pools) and self._scheduler.waiting:
            raise RunnerError("no request can be computed, and none is under way")
        self._rows.complete(self.num_steps)

    def _assemble(self, plan: StepPlan) -> BatchArrays:
        """Lay a batch out, padded as for a captured graph in some steps."""
        limits = self.scenario.limits
        num_reqs = len(plan.scheduled)
        if self._draw.random() < 0.5:
            num_reqs = self._draw.randint(num_reqs, limits.max_num_reqs)
        return assemble(plan.scheduled, self._buffers, num_reqs_padded=num_reqs)
