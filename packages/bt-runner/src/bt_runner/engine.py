"""What a user holds: requests come and go, and each step gives some of them tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bt_runner.arguments import as_list, as_tokens, require_attributes, require_kind
from bt_runner.decode_loop import DecodeLoop, StepOutput
from bt_runner.drafters import Drafter
from bt_runner.errors import BadInputError
from bt_runner.execution.graphs import GraphOptions
from bt_runner.execution.guard import TableGuard
from bt_runner.execution.model_runner import ModelRunner
from bt_runner.execution.observer import Recorder
from bt_runner.models.cache.cache_groups import CacheGroup, CacheOptions
from bt_runner.models.config import ModelConfig
from bt_runner.models.sharding import Alone, Ranks
from bt_runner.models.weights import Weights
from bt_runner.scheduling.block_pool import BlockPool
from bt_runner.scheduling.request import Request, SamplingParams
from bt_runner.scheduling.rows import RequestRows
from bt_runner.scheduling.scheduler import Scheduler
from bt_width import BlockTableLayout, ServingLimits


class Engine:
    """Runs requests through a model, all cached state in blocks.

    Add requests at any time, then call ``step`` until ``has_work`` is false, or let
    ``generate`` do it. Where a step raises, its requests start over in the next one, with
    the tokens they have.

    While the device computes a step the host plans and stages the next one, so a request
    that is added meanwhile joins the one after it. With a drafter that has to wait: what
    is drafted depends on the tokens.
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

        Raises:
            BadInputError: One of them is not what it should be, or does not fit the others.
            BlockTableError: No plan serves the limits with caches cut that way.
        """
        options = CacheOptions() if options is None else options
        graphs = GraphOptions() if graphs is None else graphs
        ranks = Alone() if ranks is None else ranks
        require_kind("config", config, ModelConfig)
        require_kind("limits", limits, ServingLimits)
        require_kind("options", options, CacheOptions)
        require_kind("graphs", graphs, GraphOptions)
        require_kind("sanitizes", sanitizes, bool)
        require_attributes("ranks", ranks, "size", "rank", "gather", "gather_texts")
        if drafter is not None:
            require_attributes("drafter", drafter, "propose")
        self._runner = ModelRunner(
            config,
            weights,
            limits,
            options=options,
            num_blocks=num_blocks,
            ranks=ranks,
            graphs=graphs,
        )
        self._rows = RequestRows(self._runner.preparation.layouts, self._runner.num_blocks)
        if sanitizes:
            self._runner.preparation.guard = TableGuard(self._rows.layouts, self._rows.pools)
        self._scheduler = Scheduler(limits, self._rows)
        self._loop = DecodeLoop(
            self._runner, self._scheduler, self._rows, drafter, limits.num_speculative_tokens
        )
        self._num_added = 0

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The model's cache groups."""
        return self._runner.groups

    @property
    def layouts(self) -> tuple[BlockTableLayout, ...]:
        """The plan of each group."""
        return self._rows.layouts

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The pool of each group."""
        return self._rows.pools

    @property
    def cache_bytes(self) -> tuple[int, ...]:
        """The bytes of each group's caches."""
        return tuple(self._runner.caches.num_bytes(group) for group in self.groups)

    @property
    def num_steps(self) -> int:
        """Steps launched."""
        return self._loop.num_steps

    @property
    def host_seconds(self) -> float:
        """What the host has spent on the steps, its waits for the device left out."""
        return self._loop.clock.seconds

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._scheduler.requests)

    def observe(self, recorder: Recorder) -> None:
        """Let ``recorder`` see every step from now on.

        Raises:
            BadInputError: It cannot record.
        """
        require_attributes("recorder", recorder, "record")
        self._runner.recorder = recorder

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
        tokens = as_tokens("the prompt", prompt, self._runner.vocab_size)
        if name in self._scheduler.requests:
            raise BadInputError(f"there is a request {name!r} already", request_id=name)
        request = Request(
            request_id=name,
            prompt_len=len(tokens),
            params=params,
            tokens=tokens,
        )
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
        self._scheduler.add(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request early and give its blocks back.

        Raises:
            BadInputError: No request of that name waits or runs.
        """
        require_kind("request_id", request_id, str)
        if request_id not in self._scheduler.requests:
            raise BadInputError(f"there is no request {request_id!r}", request_id=request_id)
        self._loop.abort(self._scheduler.requests[request_id])

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

    def step(self) -> list[StepOutput]:
        """Compute one batch and choose tokens for those of its requests that are due one."""
        return self._loop.step()
