"""Random requests over one scenario, on all of its ranks at once: the engine's own loop."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import numpy as np
import torch
from tests.soak.counts import Counts
from tests.soak.rank import Rank, setup_of
from tests.soak.scenario import Scenario
from tests.soak.token_store import TokenStore

from bt_runner.arrays import Ints, Tokens
from bt_runner.engine import EngineLoop
from bt_runner.errors import VerificationError
from bt_runner.input_batch import InputBuffers, dummy_batch
from bt_runner.kv_cache_manager import KVCacheManager, TableEdits
from bt_runner.model_runner import InFlightStep, ModelRunner
from bt_runner.replay.check import StepCheck
from bt_runner.requests import Request, RunningRequests, SamplingParams
from bt_runner.scheduler import Scheduler, SchedulerOutput
from bt_tables import StepTables

MAX_WAITING = 3
BROKEN = 0.005
ORACLE_EVERY = 25
RIGHT, WRONG = 0, 1


class BrokenStepError(Exception):
    """A step that failed in the middle."""


class RanksRunner(ModelRunner):
    """Runs steps on all ranks of a scenario without a model, and checks each on every rank."""

    def __init__(
        self,
        scenario: Scenario,
        kv: KVCacheManager,
        ranks: Sequence[Rank],
        draw: random.Random,
        counts: Counts,
        device: torch.device,
    ) -> None:
        self.layouts = ranks[0].layouts
        self.inputs = InputBuffers(scenario.limits, device, 2)
        self._scenario = scenario
        self._draw = draw
        self._counts = counts
        self._ranks = ranks
        self._oracles = [StepCheck(scenario.names, kv, rank.layouts) for rank in ranks]
        self._stores = [
            None if group.layout.slot_mode == "none" else TokenStore(layouts, group.pool.num_blocks)
            for layouts, group in zip(
                zip(*(rank.layouts for rank in ranks), strict=True), kv.groups, strict=True
            )
        ]

    def launch(
        self,
        step: int,
        batch: SchedulerOutput,
        edits: TableEdits,
        table: RunningRequests,
        *,
        records: bool = False,
    ) -> InFlightStep:
        """Run a step on all ranks; now and then fail when some have edited their rows."""
        fails = self._draw.random() < BROKEN
        staging = len(self._ranks)
        if fails:
            staging = self._draw.randrange(len(self._ranks))
        for rank in self._ranks[:staging]:
            rank.stage(batch, edits)
        if fails:
            raise BrokenStepError
        # padded as for a captured graph in some steps
        num_reqs = len(batch.rows)
        if self._draw.random() < 0.5:
            num_reqs = self._draw.randint(num_reqs, self._scenario.limits.max_num_reqs)
        inputs = self.inputs.pack(batch, table, num_reqs_padded=num_reqs)
        tables = [rank.step(batch, inputs) for rank in self._ranks]
        self._check_tokens(batch, tables)
        if self._counts.num_steps % ORACLE_EVERY == 0:
            for oracle, of_rank in zip(self._oracles, tables, strict=True):
                oracle.check(batch, inputs, of_rank)
            self._counts.num_oracle_steps += 1
        self._counts.note_step(batch, inputs, len(self._ranks))
        is_right = [
            self._draw.random() < self._scenario.acceptance
            for _ in range(int(batch.num_choices.sum()))
        ]
        chosen = torch.tensor([RIGHT if right else WRONG for right in is_right], dtype=torch.int64)
        return InFlightStep(
            step=step,
            batch=batch,
            metadata=[],
            rows=inputs.rows,
            streams=None,
            logits=torch.empty(0),
            chosen=chosen,
            event=None,
        )

    def commit_drafts(self, in_flight: InFlightStep, num_kept: Ints) -> bool:
        """Copy nothing: there is no cache."""
        return False

    def invalidate(self) -> None:
        """Mark all ranks' device rows stale."""
        self.forget(is_remapped=False)

    def forget(self, *, is_remapped: bool) -> None:
        """Mark all ranks' device rows stale: a step failed, or memory was remapped."""
        for rank in self._ranks:
            rank.forget(is_remapped=is_remapped)

    def dummy_step(self, num_reqs: int, query_len: int) -> None:
        """Run a batch of padding on all ranks."""
        inputs = self.inputs.pack(dummy_batch(num_reqs, query_len), RunningRequests(1))
        for rank in self._ranks:
            rank.dummy_step(inputs)

    def _check_tokens(self, batch: SchedulerOutput, tables: Sequence[StepTables]) -> None:
        """Write and read a step's tokens in every group that keeps tokens."""
        for group, store in enumerate(self._stores):
            if store is not None:
                slots = [of_rank.slot_mappings[group].cpu().numpy() for of_rank in tables]
                columns = [of_rank.block_tables[group].cpu().numpy() for of_rank in tables]
                store.write(batch, slots, group)
                store.read(batch, columns, group)


class AlwaysRight:
    """Drafts the token that a right draft is."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts

    def propose_all(self, scheduler: Scheduler, rows: Ints) -> tuple[Tokens, Ints]:
        """Return as many drafts as a step may have."""
        drafts = np.full((len(rows), self._max_drafts), RIGHT, np.int32)
        return drafts, np.full(len(rows), self._max_drafts)


class SoakLoop:
    """Serves random requests, and checks every step on every rank.

    Attributes:
        scenario: What is served.
        kv: Who holds which blocks.
        runner: Runs steps on all ranks.
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
        self._draw = draw
        self._counts = counts
        self._num_requests = 0
        num_ranks = scenario.limits.context_parallel.size
        setups = [setup_of(scenario, rank, device) for rank in range(num_ranks)]
        layouts = setups[0].layouts
        self.kv = KVCacheManager(layouts, scenario.num_blocks(layouts))
        ranks = [Rank(setup, self.kv, device, draw) for setup in setups]
        self.runner = RanksRunner(scenario, self.kv, ranks, draw, counts, device)
        self._scheduler = Scheduler(scenario.limits, self.kv)
        max_drafts = scenario.limits.num_speculative_tokens
        self._loop = EngineLoop(
            self.runner,
            self._scheduler,
            AlwaysRight(max_drafts) if max_drafts else None,
            1 if max_drafts else scenario.max_steps_in_flight,
        )

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return self._loop.num_steps

    def run(self, num_steps: int, until: float = math.inf) -> None:
        """Let requests come and go for some steps, or until ``time.monotonic()`` is ``until``.

        Raises:
            BlockTableError: The sanitizer, the tables or the builders refused a step.
            VerificationError: A step is not what the contract says.
            RunnerError: Requests wait, and none can be computed.
        """
        for _ in range(num_steps):
            if time.monotonic() >= until:
                break
            self._let_come()
            self._disturb()
            self._step()

    def drain(self, until: float = math.inf) -> None:
        """Serve those that are left, and see that every block came back.

        What is left when ``time.monotonic()`` is ``until`` is aborted.

        Raises:
            BlockTableError: As for ``run``.
            VerificationError: As for ``run``, or a pool lacks a block.
            RunnerError: As for ``run``.
        """
        while self._loop.has_work:
            if time.monotonic() >= until:
                for name in list(self._scheduler.requests):
                    self._loop.abort(name)
                    self._counts.num_aborted += 1
            self._step()
        for pool, name in zip(self.kv.pools, self.scenario.names, strict=True):
            num_lost = pool.capacity - pool.num_free
            if num_lost:
                self._counts.num_lost_blocks += num_lost
                raise VerificationError(
                    f"group {name}: {num_lost} of {pool.capacity} blocks did not come back",
                    group=name,
                    expected=pool.capacity,
                    found=pool.num_free,
                )

    def _let_come(self) -> None:
        limits = self.scenario.limits
        while len(self._scheduler.waiting) < MAX_WAITING and self._draw.random() < 0.5:
            prompt_len = self._draw.randint(1, self._draw.choice([1, 8, 40, limits.max_model_len]))
            num_new = self._draw.randint(1, self._draw.choice([1, 30, 200]))
            total = min(prompt_len + num_new, limits.max_model_len)
            prompt_len = min(prompt_len, total - 1)
            params = SamplingParams(max_new_tokens=total - prompt_len)
            name = str(self._num_requests)
            self._num_requests += 1
            self._loop.add(Request(name, np.zeros(prompt_len, np.int32), params))

    def _disturb(self) -> None:
        """Do now and then what an engine does between two steps."""
        chance, limits = self._draw.random(), self.scenario.limits
        names = list(self._scheduler.requests)
        if chance < 0.02 and names:
            self._loop.abort(self._draw.choice(names))
            self._counts.num_aborted += 1
        elif chance < 0.06:
            query_len = self._draw.choice([1, 1 + limits.num_speculative_tokens])
            most = min(limits.max_num_reqs, limits.max_num_batched_tokens // query_len)
            self.runner.dummy_step(self._draw.randint(1, most), query_len)
            self._counts.num_dummy_steps += 1
        elif chance < 0.07:
            self.runner.forget(is_remapped=self._draw.random() < 0.5)

    def _step(self) -> None:
        before = self._scheduler.num_preemptions
        try:
            self._counts.num_ended += len(self._loop.step().reasons)
        except BrokenStepError:
            self._counts.num_broken_steps += 1
        self._counts.num_preemptions += self._scheduler.num_preemptions - before
