"""The decode loop without a model: everything of a step but its arithmetic, for traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bt_builders import AttentionSetup
from bt_runner.errors import RequestRefusedError, RunnerError
from bt_runner.execution.batch import BatchArrays, BatchBuffers, assemble
from bt_runner.execution.guard import TableGuard
from bt_runner.execution.staging import stage_plan
from bt_runner.replay.check import StepCheck
from bt_runner.replay.outcomes import Outcomes
from bt_runner.replay.sharing.rows import SharedRows
from bt_runner.replay.summary import Summary
from bt_runner.replay.traffic.arrivals import Arrivals
from bt_runner.replay.traffic.trace import TraceRequest
from bt_runner.scheduling.request import Request, SamplingParams
from bt_runner.scheduling.scheduler import Scheduler
from bt_runner.scheduling.step_plan import StepPlan
from bt_tables import StagedBlockTables, StepTables
from bt_width import BlockTableLayout

_PADDED_REQS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a trace is replayed.

    Attributes:
        acceptance: The share of drafts that turn out right, each after a right one.
        seed: Of the drafts' fate.
        verify_every: Steps between two that are compared with the contract.
        sanitizes: Whether the sanitizer checks every step.
    """

    acceptance: float = 0.7
    seed: int = 0
    verify_every: int = 100
    sanitizes: bool = False


class Replay:
    """Runs the requests of a trace through scheduler, pools, tables and builders.

    Attributes:
        rows: Who holds which blocks.
        summary: The figures so far.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        setup: AttentionSetup,
        tables: StagedBlockTables,
        num_blocks: tuple[int, ...],
        options: ReplayOptions,
    ) -> None:
        """Start with empty tables.

        Args:
            names: What the cache groups are called.
            setup: Their plans and builders.
            tables: Their tables, made from the same plans.
            num_blocks: Blocks of each group's pool, the null block included.
            options: How the trace is replayed.
        """
        self.rows = SharedRows(setup.layouts, num_blocks)
        self.summary = Summary(groups=names, pool_blocks=num_blocks)
        self._layouts = setup.layouts
        self._limits = setup.layouts[0].limits
        self._builders = [group.builders for group in setup.groups]
        self._tables = tables
        self._options = options
        self._scheduler = Scheduler(self._limits, self.rows)
        self._check = StepCheck(names, setup.layouts, self.rows)
        self._guard = TableGuard(setup.layouts, self.rows.pools) if options.sanitizes else None
        self._outcomes = Outcomes(self._scheduler, self.rows, options.acceptance, options.seed)
        self._buffers = BatchBuffers(self._limits, tables.device)

    @property
    def layouts(self) -> tuple[BlockTableLayout, ...]:
        """The plans of the cache groups."""
        return tuple(self._layouts)

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._scheduler.waiting)

    def run(
        self, arrivals: Arrivals, on_refused: Callable[[TraceRequest, str], None]
    ) -> Iterator[int]:
        """Replay a trace, and give the number of requests ended so far after each step.

        Args:
            arrivals: The requests.
            on_refused: Told of each request that could never run, and why.

        Raises:
            VerificationError: A table, a slot or a pool's book is not what it should be.
            BlockTableFaultError: The sanitizer found something.
        """
        began = time.perf_counter()
        while True:
            self._admit(arrivals, on_refused)
            if not self._scheduler.requests:
                if arrivals.is_over:
                    break
                arrivals.pass_idle()
                continue
            self._step()
            arrivals.pass_step()
            self.summary.seconds = time.perf_counter() - began
            yield self.summary.num_requests
        self._check.check_books([])

    def _admit(self, arrivals: Arrivals, on_refused: Callable[[TraceRequest, str], None]) -> None:
        # no more wait than could all run: a prompt of a trace is long
        while len(self._scheduler.waiting) < self._limits.max_num_reqs:
            traced = arrivals.take()
            if traced is None:
                return
            if traced.prompt_len + traced.output_len > self._limits.max_model_len:
                # said before its tokens are made: a trace may ask for any number of them
                self.summary.num_refused += 1
                on_refused(
                    traced,
                    f"{traced.prompt_len} prompt tokens and {traced.output_len} new ones are more "
                    f"than max_model_len {self._limits.max_model_len}",
                )
                continue
            request = Request(
                request_id=f"line {traced.line}",
                prompt_len=traced.prompt_len,
                params=SamplingParams(max_new_tokens=traced.output_len),
                tokens=[0] * traced.prompt_len,
            )
            try:
                self._scheduler.add(request)
            except RequestRefusedError as error:
                self.summary.num_refused += 1
                on_refused(traced, str(error))
                continue
            self.rows.name_prefix(request, traced.hash_ids, traced.hash_tokens)
            self.summary.prompt_tokens += traced.prompt_len

    def _step(self) -> None:
        summary = self.summary
        plan = self._scheduler.schedule(last_step=summary.num_steps)
        if not plan.scheduled:
            raise RunnerError("no request can be computed, and none is under way")
        summary.num_steps += 1
        batch = self._assemble(plan)
        tables = self._update_tables(plan, batch)
        if self._guard is not None:
            self._guard.check(plan.scheduled, batch, tables)
        self._build_metadata(batch, tables)
        if (summary.num_steps - 1) % self._options.verify_every == 0:
            self._check.check_tables(plan.scheduled, batch, tables)
            self._check.check_books(self._scheduler.running)
            summary.num_checked_steps += 1
        summary.note_blocks(self.rows.pools)
        summary.num_tokens += sum(part.num_tokens for part in plan.scheduled)
        summary.num_preemptions += plan.num_preempted
        for request, num_taken in self._outcomes.settle(plan, summary.num_steps):
            summary.num_output_tokens += num_taken
            summary.num_requests += request.finish_reason is not None
        # nothing is in flight when a step returns, so what it gave up is free at once
        self.rows.complete(summary.num_steps)
        summary.hit_tokens = self.rows.prefixes.hit_tokens
        summary.rehit_tokens = self.rows.prefixes.rehit_tokens

    def _assemble(self, plan: StepPlan) -> BatchArrays:
        # padded as for a captured graph, so that padding rows are looked at too
        padded = -(-len(plan.scheduled) // _PADDED_REQS) * _PADDED_REQS
        return assemble(
            plan.scheduled,
            self._buffers,
            num_reqs_padded=min(padded, self._limits.max_num_reqs),
        )

    def _update_tables(self, plan: StepPlan, batch: BatchArrays) -> StepTables:
        began = time.perf_counter()
        stage_plan(self._tables, plan)
        tables = self._tables.step(batch.for_tables())
        self.summary.table_seconds.append(time.perf_counter() - began)
        return tables

    def _build_metadata(self, batch: BatchArrays, tables: StepTables) -> None:
        commons = batch.for_builders(self._layouts, tables)
        began = time.perf_counter()
        for common, builders in zip(commons, self._builders, strict=True):
            for builder in builders:
                builder.build(common)
        self.summary.builder_seconds.append(time.perf_counter() - began)
