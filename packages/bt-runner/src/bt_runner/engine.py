"""What a user holds: requests come and go, and each step gives some of them tokens.

    Engine              add_request, abort, step, generate
      Scheduler         which requests compute how many tokens
      KVCacheManager    the blocks of every group: pools, and which row holds which
      ModelRunner       input batch, tables, metadata, forward or CUDA graph, sampler

A step is scheduled, staged and launched while the one before it is in flight: its input is
the tokens that the one before leaves on the device, and the host reads them a step later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from bt_builders import init_attention
from bt_runner.arguments import (
    as_list,
    as_tokens,
    require_attributes,
    require_int,
    require_kind,
)
from bt_runner.arrays import Ints, Tokens
from bt_runner.block_pool import BlockPool
from bt_runner.cuda_graphs import GraphOptions
from bt_runner.drafters import Drafter
from bt_runner.errors import BadInputError, RunnerError
from bt_runner.kv_cache_manager import KVCacheManager, pool_sizes
from bt_runner.memory import require_step_memory
from bt_runner.model_runner import InFlightStep, ModelRunner, TableGuard
from bt_runner.models.caches import CacheOptions, Caches, cache_groups
from bt_runner.models.config import ModelConfig
from bt_runner.models.layers.numerics import WORKSPACE_BYTES
from bt_runner.models.paged_model import PagedModel
from bt_runner.models.sharding import Ranks, Sharding, SingleRank, require_one_plan
from bt_runner.models.weights import Weights, require_weights
from bt_runner.prefix_cache import PrefixCache
from bt_runner.recorder import Recorder
from bt_runner.requests import Request, SamplingParams
from bt_runner.sampler import Sampler
from bt_runner.scheduler import Scheduler, StepOutput, StepOutputs
from bt_tables import StagedBlockTables
from bt_width import BlockTableLayout, ServingLimits

_MAX_STEPS_IN_FLIGHT = 2


class BatchDrafter(Protocol):
    """Guesses tokens of many requests at once."""

    def propose_all(self, scheduler: Scheduler, rows: Ints) -> tuple[Tokens, Ints]:
        """Return drafts [N, K] for each of ``rows`` and how many of them count."""


class EngineLoop:
    """Steps requests through a model runner, up to two steps in flight.

    Attributes:
        max_steps_in_flight: Steps that are launched before the tokens of the first are read.
        num_steps: Steps launched.
        host_seconds: What the host has spent on the steps, its waits for the device left out.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        drafter: BatchDrafter | None,
        max_steps_in_flight: int,
    ) -> None:
        """Start before the first step.

        Args:
            runner: Runs steps on the device.
            scheduler: Says what they compute.
            drafter: What guesses tokens ahead; it needs the tokens of the step before, so
                that with it a step is launched when the one before has ended.
            max_steps_in_flight: How many may be under way at a time.
        """
        self.max_steps_in_flight = max_steps_in_flight
        self.num_steps = 0
        self.host_seconds = 0.0
        self._runner = runner
        self._scheduler = scheduler
        self._drafter = drafter
        self._recorder: Recorder | None = None
        self._in_flight: deque[InFlightStep] = deque()
        self._is_sound = True

    @property
    def layouts(self) -> tuple[BlockTableLayout, ...]:
        """The plan of each group."""
        return self._runner.layouts

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The pool of each group."""
        return self._scheduler.kv.pools

    @property
    def prefixes(self) -> PrefixCache:
        """What is cached of the beginnings of requests, and how much of it was hit."""
        return self._scheduler.kv.prefixes

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a step is in flight."""
        return bool(self._scheduler.requests or self._in_flight)

    def observe(self, recorder: Recorder) -> None:
        """Let ``recorder`` see every step from now on.

        Raises:
            BadInputError: It cannot record.
        """
        require_attributes("recorder", recorder, "record")
        self._recorder = recorder

    def add(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises:
            RequestRefusedError: It could never finish; the message has the numbers.
        """
        self._mend()
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request early and give its blocks back.

        Raises:
            BadInputError: No request of that name waits or runs.
        """
        require_kind("request_id", request_id, str)
        self._mend()
        request = self._scheduler.requests.get(request_id)
        if request is None:
            raise BadInputError(f"there is no request {request_id!r}", request_id=request_id)
        self._is_sound = False
        try:
            self._scheduler.abort(request, self.num_steps)
        except BaseException:
            self._start_over()
            raise
        self._is_sound = True

    def step(self) -> StepOutputs:
        """Launch what may be launched, then take the tokens of the oldest step in flight.

        Where it raises, its requests start over in the next step, with the tokens they have;
        those it had taken by then are in the requests, and in no output.
        """
        began = time.perf_counter()
        try:
            self._mend()
            self._propose_drafts()
            self._is_sound = False
            try:
                while len(self._in_flight) < self.max_steps_in_flight and self._launch_next():
                    pass
                outputs = self._finish_oldest()
            except BaseException:
                self._start_over()
                raise
            self._is_sound = True
            return outputs
        finally:
            self.host_seconds += time.perf_counter() - began

    def _launch_next(self) -> bool:
        """Schedule, stage and launch a step; say whether there was one."""
        scheduler = self._scheduler
        batch = scheduler.schedule(last_step=self.num_steps)
        if not len(batch.rows):
            return False
        self.num_steps += 1
        in_flight = self._runner.launch(
            self.num_steps,
            batch,
            scheduler.kv.take_edits(),
            scheduler.table,
            records=self._recorder is not None,
        )
        scheduler.launched(batch, self.num_steps)
        self._in_flight.append(in_flight)
        return True

    def _finish_oldest(self) -> StepOutputs:
        """Wait for the oldest step in flight, and give its requests their tokens."""
        scheduler = self._scheduler
        if not self._in_flight:
            if scheduler.requests:
                raise RunnerError("no request can be computed, and no step is in flight")
            return StepOutputs.none()
        in_flight = self._in_flight[0]
        began = time.perf_counter()
        chosen = in_flight.wait()
        self.host_seconds -= time.perf_counter() - began
        batch = in_flight.batch
        if self._recorder is not None and in_flight.streams is not None:
            self._recorder.record(
                in_flight.step, batch, scheduler.table, in_flight.streams, in_flight.logits
            )
        verified = scheduler.verify(batch, chosen)
        if self._drafter is not None:
            num_kept = np.ones(len(batch.rows), np.int64)
            num_kept[verified.places] = verified.kept
            on_device = self._runner.commit_drafts(in_flight, num_kept)
            scheduler.table.num_accepted[batch.rows] = 0 if on_device else num_kept
        outputs = scheduler.update(batch, verified, self.num_steps)
        self._in_flight.popleft()
        scheduler.kv.complete(in_flight.step)
        return outputs

    def _propose_drafts(self) -> None:
        """Ask for what may follow each request that decodes; here an error costs no token."""
        if self._drafter is None:
            return
        rows = self._scheduler.rows_to_draft()
        if len(rows):
            drafts, counts = self._drafter.propose_all(self._scheduler, rows)
            self._scheduler.table.set_drafts(rows, drafts, counts)

    def _mend(self) -> None:
        """Start over where the last call failed and could not do so itself."""
        if not self._is_sound:
            self._start_over()

    def _start_over(self) -> None:
        """Trust nothing that was under way: Ctrl-C comes between any two instructions."""
        self._is_sound = False
        self._in_flight.clear()
        self._scheduler.start_over(self.num_steps)
        self._runner.invalidate()
        self._scheduler.kv.complete(self.num_steps)
        self._is_sound = True


class _OneByOne:
    """Asks a user's drafter for one request after another."""

    def __init__(self, drafter: Drafter, max_drafts: int, vocab_size: int) -> None:
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._vocab_size = vocab_size

    def propose_all(self, scheduler: Scheduler, rows: Ints) -> tuple[Tokens, Ints]:
        drafts = np.zeros((len(rows), self._max_drafts), np.int32)
        counts = np.zeros(len(rows), np.int64)
        for place, row in enumerate(rows.tolist()):
            tokens = scheduler.table.tokens_of(row).tolist()
            proposed = self._drafter.propose(tokens, self._max_drafts)
            found = as_tokens("what the drafter proposes", proposed, self._vocab_size)
            found = found[: self._max_drafts]
            drafts[place, : len(found)] = found
            counts[place] = len(found)
        return drafts, counts


class Engine(EngineLoop):
    """Runs requests through a model, all cached state in blocks.

    Add requests at any time, then call ``step`` until ``has_work`` is false, or let
    ``generate`` do it. Where a step raises, its requests start over in the next one, with
    the tokens they have.

    With two steps in flight the next step is launched before the tokens of this one have
    reached the host, so a request that is added meanwhile joins the one after it, and a stop
    token is noticed a step late: the token after it is dropped. With a drafter one step is in
    flight: what is drafted depends on the tokens.

    An engine and its requests belong to one thread at a time; engines of several threads have
    nothing in common but weights, which they only read.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        limits: ServingLimits,
        *,
        options: CacheOptions | None = None,
        num_blocks: int | Sequence[int] | None = None,
        drafter: Drafter | None = None,
        ranks: Ranks | None = None,
        graphs: GraphOptions | None = None,
        sanitizes: bool = False,
        max_steps_in_flight: int = _MAX_STEPS_IN_FLIGHT,
        workspace_bytes: int = WORKSPACE_BYTES,
        prefix_caching: bool = True,
    ) -> None:
        """Plan the cache groups and allocate all there is.

        Args:
            config: The model.
            weights: Its tensors; their dtype and device are the engine's.
            limits: What is served.
            options: How the caches are cut.
            num_blocks: Blocks of each group's pool, the null block included; by default
                enough for ``max_num_reqs`` of the longest requests.
            drafter: What guesses tokens ahead; ``limits`` says how many.
            ranks: The processes that share every request's attention caches, all of which
                do the same; ``limits`` says the same of them.
            graphs: Which decode steps are captured; none by default.
            sanitizes: Whether every step's tables are checked before a layer reads them.
            max_steps_in_flight: 1 is the plain loop, which reads a step's tokens before it
                launches the next; with a drafter it is 1 whatever is asked.
            workspace_bytes: What the temporary tensors of a layer may take; work that needs
                more is done in pieces.
            prefix_caching: Whether requests that begin alike share what is computed for
                it; no token depends on it. ``prefixes.reason_for_none`` says why a model
                has nothing to share.

        Raises:
            BadInputError: One of them is not what it should be, or does not fit the others.
            BlockTableError: No plan serves the limits with caches cut that way.
        """
        options = CacheOptions() if options is None else options
        graphs = GraphOptions() if graphs is None else graphs
        ranks = SingleRank() if ranks is None else ranks
        require_kind("config", config, ModelConfig)
        require_kind("limits", limits, ServingLimits)
        require_kind("options", options, CacheOptions)
        require_kind("graphs", graphs, GraphOptions)
        require_kind("sanitizes", sanitizes, bool)
        require_kind("prefix_caching", prefix_caching, bool)
        require_int(
            "max_steps_in_flight", max_steps_in_flight, minimum=1, maximum=_MAX_STEPS_IN_FLIGHT
        )
        require_int("workspace_bytes", workspace_bytes, minimum=1)
        require_attributes("ranks", ranks, "size", "rank", "gather", "gather_texts")
        batch_drafter: BatchDrafter | None = None
        if drafter is not None:
            require_attributes("drafter", drafter, "propose")
            max_drafts = limits.num_speculative_tokens
            batch_drafter = _OneByOne(drafter, max_drafts, config.vocab_size)
            max_steps_in_flight = 1
        require_weights(config, weights)
        embedding = weights[config.names.embedding]
        device, dtype = embedding.device, embedding.dtype
        self.groups = cache_groups(config, options)
        attention = [group.attention for group in self.groups]
        require_step_memory(attention, limits, device)
        setup = init_attention(attention, limits, device)
        require_one_plan(ranks, setup.layouts)
        sizes = pool_sizes(setup.layouts, num_blocks, steps_in_flight=max_steps_in_flight)
        # the caches first: they are refused where memory cannot hold so many blocks
        self._caches = Caches(self.groups, setup.layouts, sizes, dtype, device)
        names = [group.name for group in self.groups]
        kv = KVCacheManager(setup.layouts, sizes, prefix_caching=prefix_caching, names=names)
        sharding = Sharding(ranks, limits.context_parallel.interleave)
        runner = ModelRunner(
            setup,
            PagedModel(config, weights, self._caches, sharding, workspace_bytes),
            Sampler(),
            tables=StagedBlockTables(
                setup.layouts,
                device=device,
                num_blocks=sizes,
                max_steps_in_flight=max_steps_in_flight,
            ),
            limits=limits,
            device=device,
            dtype=dtype,
            graphs=graphs,
            max_steps_in_flight=max_steps_in_flight,
            checks=[TableGuard(kv)] if sanitizes else (),
        )
        super().__init__(runner, Scheduler(limits, kv), batch_drafter, max_steps_in_flight)
        self._vocab_size = config.vocab_size
        self._num_added = 0

    @property
    def cache_bytes(self) -> tuple[int, ...]:
        """The bytes of each group's caches."""
        return tuple(self._caches.num_bytes(group) for group in self.groups)

    def new_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Request:
        """Return a request that fits; nothing is changed.

        Raises:
            RequestRefusedError: It could never finish; the message has the numbers.
            BadInputError: Its name is in use, or an argument is not what it should be.
        """
        params = SamplingParams() if params is None else params
        require_kind("params", params, SamplingParams)
        name = f"request-{self._num_added}" if request_id is None else request_id
        require_kind("request_id", name, str)
        tokens = as_tokens("the prompt", prompt, self._vocab_size)
        if name in self._scheduler.requests:
            raise BadInputError(f"there is a request {name!r} already", request_id=name)
        request = Request(name, np.array(tokens, np.int32), params)
        self._scheduler.require_fit(request)
        return request

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Request:
        """Let a new request wait for its turn; it raises what ``new_request`` does."""
        request = self.new_request(prompt, params, request_id=request_id)
        self._num_added += 1
        self.add(request)
        return request

    def generate(
        self, prompts: Iterable[Sequence[int]], params: SamplingParams | None = None
    ) -> Iterator[StepOutput]:
        """Run prompts to their end, giving tokens as they come, step by step.

        Raises:
            BadInputError: As for ``new_request``; then none of them was added.
            RequestRefusedError: As for ``new_request``; then none of them was added.
        """
        prompts = as_list("prompts", prompts)
        for prompt in prompts:
            self.new_request(prompt, params)
        for prompt in prompts:
            self.add_request(prompt, params)
        while self.has_work:
            yield from self.step()
