"""Several requests through an engine at once, cut as a test asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bt_runner.drafters import Drafter, NGramDrafter
from bt_runner.engine import Engine
from bt_runner.models.caches import CacheOptions
from bt_runner.models.config import ModelConfig
from bt_runner.models.weights import Weights
from bt_runner.recorder import Recorder
from bt_runner.requests import Request, SamplingParams
from bt_width import ServingLimits

LIMITS = ServingLimits(max_model_len=256, max_num_reqs=4, max_num_batched_tokens=256)
OPTIONS = CacheOptions(
    attention_block_size=8, sparse_block_size=16, kernel_block_sizes=(8,), mamba_block_size=16
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How requests are served.

    Attributes:
        limits: What a step may hold.
        options: How the caches are cut.
        num_blocks: Blocks of every pool; ample where it is None.
        late: How many steps each request arrives after the one before it.
        max_steps_in_flight: Steps that may be under way at a time.
    """

    limits: ServingLimits = LIMITS
    options: CacheOptions = OPTIONS
    num_blocks: int | None = None
    late: int = 0
    max_steps_in_flight: int = 2

    def engine(
        self, config: ModelConfig, weights: Weights, drafter: Drafter | None = None
    ) -> Engine:
        """Return an engine that serves in this way; drafts come from the text by default."""
        if drafter is None and self.limits.num_speculative_tokens:
            drafter = NGramDrafter()
        return Engine(
            config,
            weights,
            self.limits,
            options=self.options,
            num_blocks=self.num_blocks,
            drafter=drafter,
            max_steps_in_flight=self.max_steps_in_flight,
        )


TOGETHER = Way()
CHUNKED = Way(limits=replace(LIMITS, max_num_batched_tokens=7))
LATE = Way(limits=replace(LIMITS, max_num_batched_tokens=16), late=3)
ALIGNED = Way(options=replace(OPTIONS, mamba_mode="align"))
ALIGNED_CHUNKED = replace(CHUNKED, options=replace(OPTIONS, mamba_mode="align", mamba_block_size=5))
DRAFTED = Way(
    limits=replace(LIMITS, num_speculative_tokens=3),
    options=replace(OPTIONS, num_speculative_blocks=3),
)
DRAFTED_ALIGNED = replace(
    DRAFTED,
    options=replace(DRAFTED.options, mamba_mode="align", mamba_block_size=5),
)


@dataclass(frozen=True)
class Run:
    """What serving gave.

    Attributes:
        outputs: The tokens of each request.
        recorder: What was observed, by request.
        requests: The requests.
    """

    outputs: list[list[int]]
    recorder: Recorder
    requests: list[Request]

    @property
    def num_preemptions(self) -> int:
        """How often a request gave up its blocks."""
        return sum(request.num_preemptions for request in self.requests)


def serve(engine: Engine, prompts: Sequence[Sequence[int]], num_new: int, late: int = 0) -> Run:
    """Serve prompts to their end, all at once or one after another."""
    recorder = Recorder()
    engine.observe(recorder)
    requests: list[Request] = []
    params = SamplingParams(max_new_tokens=num_new)
    for prompt in prompts:
        requests.append(engine.add_request(prompt, params))
        for _ in range(late):
            engine.step()
    while engine.has_work:
        engine.step()
    return Run([request.output for request in requests], recorder, requests)
