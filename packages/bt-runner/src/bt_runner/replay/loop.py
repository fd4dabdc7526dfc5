"""Replays a trace: the engine's own loop with a model that computes nothing.

Tokens follow the trace. A prompt's are told apart by the trace's hash ids, and a draft turns
out right by chance; scheduler, KV cache manager, tables and builders are the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bt_builders import AttentionSetup
from bt_runner.arrays import Ints, Tokens
from bt_runner.cuda_graphs import GraphOptions, Work
from bt_runner.engine import EngineLoop
from bt_runner.errors import RequestRefusedError
from bt_runner.input_batch import InputBatch
from bt_runner.kv_cache_manager import KVCacheManager
from bt_runner.model_runner import ModelRunner, TableCheck, TableGuard
from bt_runner.models.step import ModelStep
from bt_runner.prefix_cache import TraceHashes
from bt_runner.replay.check import StepCheck
from bt_runner.replay.summary import Summary
from bt_runner.replay.traffic.arrivals import Arrivals
from bt_runner.replay.traffic.trace import TraceRequest
from bt_runner.requests import Request, SamplingParams
from bt_runner.sampler import Sampling
from bt_runner.scheduler import Scheduler, SchedulerOutput
from bt_tables import StagedBlockTables, StepTables
from bt_width import BlockTableLayout

_PADDED_REQS = 8
_RIGHT = 0
_WRONG = 1


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


class TraceModel:
    """Computes nothing, and chooses tokens by chance.

    Every draft is the same token, and so is what is chosen where it turns out right.
    """

    def __init__(self, limits_tokens: int, acceptance: float, seed: int, max_drafts: int) -> None:
        """Take how many tokens a step has at most, and how often a draft turns out right."""
        self._nothing = torch.empty(limits_tokens, 0)
        self._acceptance = acceptance
        self._max_drafts = max_drafts
        self._draw = np.random.default_rng(seed)

    def forward(self, step: ModelStep) -> list[Tensor]:
        """Return a residual stream without numbers."""
        return [self._nothing[: len(step.token_ids)]]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits without numbers."""
        return hidden

    def copy_blocks(self, group: int, source_ids: Tensor, target_ids: Tensor) -> None:
        """Copy nothing: there is no cache."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """Return ``[S]`` int64: what the drafts say, or something else."""
        is_right = self._draw.random(len(logits)) < self._acceptance
        return torch.from_numpy(np.where(is_right, _RIGHT, _WRONG))

    def propose_all(self, scheduler: Scheduler, rows: Ints) -> tuple[Tokens, Ints]:
        """Return as many drafts as a step may have, the same for all."""
        drafts = np.full((len(rows), self._max_drafts), _RIGHT, np.int32)
        return drafts, np.full(len(rows), self._max_drafts)


class _Watch:
    """Counts what each step computes, and compares some of them with the contract."""

    def __init__(self, check: StepCheck, summary: Summary, verify_every: int) -> None:
        self._check = check
        self._summary = summary
        self._verify_every = verify_every

    def check(self, batch: SchedulerOutput, inputs: InputBatch, tables: StepTables) -> None:
        summary = self._summary
        summary.num_steps += 1
        summary.num_tokens += int(batch.num_tokens.sum())
        summary.note_blocks(self._check.kv.pools)
        if (summary.num_steps - 1) % self._verify_every == 0:
            self._check.check(batch, inputs, tables)
            summary.num_checked_steps += 1


class Replay:
    """Runs the requests of a trace through the engine's loop.

    Attributes:
        kv: Which row holds which blocks.
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
        limits = setup.layouts[0].limits
        max_drafts = limits.num_speculative_tokens
        self.kv = KVCacheManager(setup.layouts, num_blocks, prefix_caching=True, names=names)
        self.summary = Summary(groups=names, pool_blocks=num_blocks)
        self._check = StepCheck(names, self.kv)
        self._scheduler = Scheduler(limits, self.kv)
        self._max_num_reqs = limits.max_num_reqs
        checks: list[TableCheck] = [TableGuard(self.kv)] if options.sanitizes else []
        checks.append(_Watch(self._check, self.summary, options.verify_every))
        model = TraceModel(
            limits.max_num_batched_tokens, options.acceptance, options.seed, max_drafts
        )
        # padded as for captured graphs, so that padding rows are looked at too
        sizes = range(_PADDED_REQS, limits.max_num_reqs + _PADDED_REQS, _PADDED_REQS)
        self._runner = ModelRunner(
            setup,
            model,
            model.sample,
            tables=tables,
            limits=limits,
            device=tables.device,
            dtype=torch.float32,
            graphs=GraphOptions(batch_sizes=tuple(sizes), capture=_done_again),
            max_steps_in_flight=1,
            checks=checks,
        )
        self._loop = EngineLoop(self._runner, self._scheduler, model if max_drafts else None, 1)

    @property
    def layouts(self) -> tuple[BlockTableLayout, ...]:
        """The plans of the cache groups."""
        return self._loop.layouts

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
            VerificationError: A table, a slot or a pool's count is not what it should be.
            BlockTableFaultError: The sanitizer found something.
        """
        began = time.perf_counter()
        while True:
            self._admit(arrivals, on_refused)
            if not self._loop.has_work:
                if arrivals.is_over:
                    break
                arrivals.pass_idle()
                continue
            self._step()
            arrivals.pass_step()
            self.summary.seconds = time.perf_counter() - began
            yield self.summary.num_requests
        self._check.check_counts()

    def _admit(self, arrivals: Arrivals, on_refused: Callable[[TraceRequest, str], None]) -> None:
        # no more wait than could all run: a prompt of a trace is long
        while len(self._scheduler.waiting) < self._max_num_reqs:
            traced = arrivals.take()
            if traced is None:
                return
            params = SamplingParams(max_new_tokens=traced.output_len)
            tokens = np.zeros(traced.prompt_len, np.int32)
            request = Request(f"line {traced.line}", tokens, params)
            request.prefix_hashes = TraceHashes(
                traced.hash_ids, traced.hash_tokens, traced.prompt_len
            )
            try:
                self._loop.add(request)
            except RequestRefusedError as error:
                self.summary.num_refused += 1
                on_refused(traced, str(error))
            else:
                self.summary.prompt_tokens += traced.prompt_len

    def _step(self) -> None:
        summary = self.summary
        outputs = self._loop.step()
        summary.table_seconds.append(self._runner.table_seconds)
        summary.builder_seconds.append(self._runner.builder_seconds)
        summary.num_output_tokens += int(outputs.counts.sum())
        summary.num_requests += len(outputs.reasons)
        summary.num_preemptions = self._scheduler.num_preemptions
        summary.hit_tokens = self.kv.prefixes.hit_tokens
        summary.rehit_tokens = self.kv.prefixes.rehit_tokens


def _done_again(work: Work) -> Work:
    """Stand in for a CUDA graph: a model that computes nothing needs none."""
    return work
