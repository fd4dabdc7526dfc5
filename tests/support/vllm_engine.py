"""vLLM's scheduler and KV cache manager under random traffic, for either of its runners."""

from __future__ import annotations

import json
import os
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from .vllm_runners import RUNNERS, PreparedBatch

BLOCK = 16
MAX_LEN = 512
MAX_REQS = 6
MAX_TOKENS = 96
BLOCKS_PER_GROUP = 36
"""A little more than the longest request takes, so that others are preempted."""


def full() -> list[Any]:
    return [_attention()]


def sliding_and_full() -> list[Any]:
    window = SlidingWindowSpec(
        block_size=BLOCK,
        num_kv_heads=2,
        head_size=16,
        dtype=torch.float32,
        sliding_window=40,
        dcp_sharded=False,
    )
    return [_attention(), window]


def mla_and_indexer() -> list[Any]:
    return [
        MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=size, dtype=torch.float32)
        for size in (576, 132)
    ]


def hybrid(drafts: int = 0) -> list[Any]:
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
    )
    return [_attention(), state]


def _attention() -> Any:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)


class Engine:
    """A scheduler and a runner, and random requests for them.

    With ``is_async`` a step is scheduled before the scheduler has seen the step before it.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[Any],
        *,
        seed: int,
        runner: str = "MRV2",
        shards: int = 1,
        rank: int = 0,
        drafts: int = 0,
        is_async: bool = False,
    ) -> None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "MRV2"))
        self.draw = random.Random(seed)
        self.shards, self.drafts, self.is_async = shards, drafts, is_async
        is_hybrid = any(isinstance(spec, MambaSpec) for spec in specs)
        self.config = _config(
            folder, is_hybrid=is_hybrid, shards=shards, drafts=drafts, is_async=is_async
        )
        num_blocks = BLOCKS_PER_GROUP * len(specs) // shards
        self.kv_cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)
            ],
        )
        self.config.cache_config.num_gpu_blocks = num_blocks
        size = BLOCK * shards
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            self.config,
            self.kv_cache_config,
            StructuredOutputManager(self.config),
            block_size=size,
            hash_block_size=size,
        )
        init_none_hash(lambda value: repr(value).encode())
        self.hasher = get_request_block_hasher(size, lambda value: repr(value).encode())
        self.runner: Any = RUNNERS[runner](self.config, shards=shards, rank=rank)
        self.prompts: list[list[int]] = []
        self.count = 0
        self.most_requests = MAX_REQS + 2
        self.steps = 0
        self.num_rejected = 0
        self.num_preempted = 0
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()

    def start(self, width_error: int = 0) -> None:
        """Make the runner's tables."""
        self.runner.initialize_kv_cache(self.kv_cache_config, width_error)

    def step(self) -> PreparedBatch | None:
        """Admit some requests, run one step, and sample; return the runner's batch."""
        self.steps += 1
        while len(self.scheduler.requests) < self.most_requests and self.draw.random() < 0.4:
            self._add()
        if self.scheduler.requests and self.draw.random() < 0.01:
            name = self.draw.choice(list(self.scheduler.requests))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        output = self.scheduler.schedule()
        self.num_preempted += len(output.preempted_req_ids or ())
        batch: PreparedBatch | None = self.runner.execute_model(output)
        if batch is not None:
            self._sample(output, batch)
        while len(self._in_flight) > (self.is_async and batch is not None):
            self.scheduler.update_from_output(*self._in_flight.popleft())
        if batch is not None and self.drafts and not self.is_async:
            drafted = [self._tokens(self.draw.randint(0, self.drafts)) for _ in batch.req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(batch.req_ids, drafted))
        return batch

    def _sample(self, output: Any, batch: PreparedBatch) -> None:
        sampled, rejected = [], []
        for name, samples in zip(batch.req_ids, batch.samples, strict=True):
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            accepted = self.draw.randint(0, drafts)
            sampled.append(self._tokens(1 + accepted) if samples else [])
            rejected.append(drafts - accepted if samples else 0)
        self.num_rejected += sum(rejected)
        self.runner.take_sampled(output, sampled, rejected)
        rows = {name: row for row, name in enumerate(batch.req_ids)}
        self._in_flight.append(
            (
                output,
                ModelRunnerOutput(
                    req_ids=batch.req_ids, req_id_to_index=rows, sampled_token_ids=sampled
                ),
            )
        )

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(3, 128) for _ in range(count)]

    def _add(self) -> None:
        if self.prompts and self.draw.random() < 0.5:
            # the beginning of an earlier prompt: a hit in the prefix cache
            earlier = self.draw.choice(self.prompts)
            prompt = earlier[: self.draw.randint(1, len(earlier))]
        else:
            prompt = []
        prompt = prompt + self._tokens(self.draw.randint(1, 120))
        prompt = prompt[: MAX_LEN - 140]
        self.prompts = [*self.prompts[-20:], prompt]
        self.count += 1
        parameters = SamplingParams(max_tokens=self.draw.randint(1, 90), ignore_eos=True)
        self.scheduler.add_request(
            Request(f"request-{self.count}", prompt, parameters, None, block_hasher=self.hasher)
        )


def _config(
    folder: Path, *, is_hybrid: bool, shards: int, drafts: int, is_async: bool
) -> VllmConfig:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_hidden_layers": 2,
                "vocab_size": 128,
                "max_position_embeddings": 4096,
                "torch_dtype": "float32",
            }
        ),
        encoding="utf-8",
    )
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_LEN
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_REQS,
            max_num_batched_tokens=MAX_TOKENS,
            max_model_len=MAX_LEN,
            is_encoder_decoder=False,
            async_scheduling=is_async,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
    )
    if is_hybrid:
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.mamba_block_size = BLOCK
    config.parallel_config.decode_context_parallel_size = shards
    if drafts:
        # the model drafts for itself, which reserves blocks ahead of what is scheduled
        config.speculative_config = SpeculativeConfig(
            method="draft_model",
            model=str(model),
            num_speculative_tokens=drafts,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    return config
