"""Small replays: a trace of our own making over a published model's shape."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from tests.support.model_configs import Config, glm_5_2

from bt_builders import AttentionGroup, init_attention
from bt_runner.kv_cache_manager import KVCacheManager
from bt_runner.replay.loop import Replay, ReplayOptions
from bt_runner.replay.model_groups import attention_group
from bt_runner.replay.pool_sizes import average_pool_sizes
from bt_runner.replay.traffic.arrivals import Arrivals
from bt_runner.replay.traffic.trace import TraceRequest
from bt_runner.requests import Request
from bt_tables import StagedBlockTables
from bt_width import BlockTableLayout, ContextParallel, ServingLimits, read_model
from bt_width.specs import MambaMode


def own_trace(num_requests: int = 30, seed: int = 0) -> list[TraceRequest]:
    """Return requests of a few conversations, each turn of which repeats those before."""
    draw = random.Random(seed)
    conversations: list[list[int]] = [[name * 100] for name in range(4)]
    requests = []
    for line in range(1, num_requests + 1):
        turns = draw.choice(conversations)
        turns.append(turns[-1] + 1)
        if len(turns) > 5:
            del turns[1:]
        requests.append(
            TraceRequest(
                line=line,
                prompt_len=len(turns) * 512 - draw.randrange(512),
                output_len=draw.randrange(1, 60),
                arrival_ms=line * 10.0,
                hash_ids=tuple(turns),
            )
        )
    return requests


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """How a model's caches are cut.

    Attributes:
        block_size: Tokens of a block.
        kernel_block_size: The only size that attention kernels take; None for any.
        mamba_mode: Whether states are kept along the way.
        mamba_block_size: Tokens between two kept states; ``block_size`` by default.
    """

    block_size: int = 64
    kernel_block_size: int | None = None
    mamba_mode: MambaMode = "none"
    mamba_block_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayCase:
    """A replay's scenario; the defaults are GLM-5.2 on two ranks with drafts.

    Attributes:
        config: The model.
        options: How its caches are cut.
        max_model_len: The longest request.
        size: Context-parallel ranks.
        interleave: Consecutive tokens on one of them.
        num_drafts: Drafts a step.
        verify_every: Steps between two that are checked.
        num_blocks: Blocks of each pool; what running requests need on average by default.
    """

    config: Config
    options: CutOptions = field(default_factory=CutOptions)
    max_model_len: int = 350_000
    size: int = 2
    interleave: int = 1
    num_drafts: int = 3
    verify_every: int = 1
    num_blocks: int | None = None

    def layouts(self, rank: int = 0) -> tuple[BlockTableLayout, ...]:
        """Return the plans of a rank's cache groups."""
        return init_attention(self._groups(), self._limits(rank), "cpu").layouts

    def make(
        self,
        trace: list[TraceRequest],
        tables_class: type[StagedBlockTables] = StagedBlockTables,
        *,
        tables_rank: int = 0,
    ) -> Replay:
        """Return a replay of ``trace``, its tables of another class or for another rank."""
        groups = self._groups()
        setup = init_attention(groups, self._limits(0), "cpu")
        num_blocks = average_pool_sizes(setup.layouts, trace, 0.7)
        if self.num_blocks is not None:
            num_blocks = (self.num_blocks,) * len(num_blocks)
        tables = tables_class(self.layouts(tables_rank), device="cpu", num_blocks=num_blocks)
        names = tuple(group.name for group in groups)
        options = ReplayOptions(verify_every=self.verify_every)
        return Replay(names, setup, tables, num_blocks, options)

    def _groups(self) -> list[AttentionGroup]:
        groups = read_model(self.config).groups(
            block_size=self.options.block_size,
            num_speculative_tokens=self.num_drafts,
            mamba_mode=self.options.mamba_mode,
            mamba_block_size=self.options.mamba_block_size,
        )
        return [attention_group(group, self.options.kernel_block_size) for group in groups]

    def _limits(self, rank: int) -> ServingLimits:
        return ServingLimits(
            max_model_len=self.max_model_len,
            max_num_reqs=8,
            max_num_batched_tokens=1024,
            num_speculative_tokens=self.num_drafts,
            context_parallel=ContextParallel(size=self.size, rank=rank, interleave=self.interleave),
        )


def glm_case() -> ReplayCase:
    """Return the scenario of the original crash: GLM-5.2 in blocks of 64, with drafts."""
    return ReplayCase(config=glm_5_2())


def drive(replay: Replay, trace: list[TraceRequest], step_ms: float | None = None) -> list[int]:
    """Run a replay to its end; return the lines that were refused."""
    refused: list[int] = []
    for _ in replay.run(Arrivals(trace, step_ms), lambda line, _why: refused.append(line.line)):
        pass
    return refused


def share_too_much(patch: pytest.MonkeyPatch) -> None:
    """Let requests compute the last tokens of a cached prefix again, in a block that is shared."""
    start = KVCacheManager.start

    def start_early(kv: KVCacheManager, row: int, request: Request) -> int:
        # two of them, one on each of two ranks
        return max(start(kv, row, request) - 2, 0)

    patch.setattr(KVCacheManager, "start", start_early)
