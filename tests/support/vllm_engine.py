"""vLLM's scheduler, KV cache manager and tables under random traffic, without a model.

The scheduler, its KV cache manager, MRV2's request states, block tables and kernels are vLLM's
own, run on the CPU; of the model runner only what computes is left out. The rest of the runner's
step is vLLM's own code, called in the order of its ``execute_model``.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# vLLM looks for a driver of Triton unless it is told that devices come later
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils import torch_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.states import RequestState

BLOCK = 16
MAX_LEN = 512
MAX_REQS = 6
MAX_TOKENS = 96
NUM_BLOCKS = 90
CPU = torch.device("cpu")


class PlainBuffer:
    """Memory that host and device share, where the device is the host."""

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> torch.Tensor:
        return self.cpu if n is None else self.cpu[:n]


buffer_utils.UvaBuffer = PlainBuffer
buffer_utils.is_uva_available = lambda: True
torch_utils.PIN_MEMORY = False


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


def hybrid() -> list[Any]:
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
    return [_attention(), state]


def _attention() -> Any:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)


def _tables(**arguments: Any) -> BlockTables:
    """Return vLLM's tables; the interpreter's ``~`` of a loaded bool is that of an int."""
    tables = BlockTables(**arguments)
    # all bits or none, so that ``~`` is its opposite
    tables.dcp_sharded = -tables.dcp_sharded.to(torch.int8)
    return tables


def _with_bool_masks(name: str, place: int) -> None:
    original = getattr(InterpreterBuilder, name)

    def operation(self: Any, *arguments: Any) -> Any:
        mask = arguments[place]
        if mask.data.dtype != np.bool_:
            mask.data = mask.data.astype(np.bool_)
        return original(self, *arguments)

    setattr(InterpreterBuilder, name, operation)


_with_bool_masks("create_masked_load", 1)
_with_bool_masks("create_masked_store", 2)


class Runner(GPUModelRunner):
    """MRV2's runner without a device, a model or a sampler."""

    def __init__(self, config: VllmConfig, *, shards: int, rank: int) -> None:
        self.vllm_config = config
        self.device = CPU
        self.max_model_len = MAX_LEN
        self.max_num_reqs = MAX_REQS
        self.max_num_tokens = MAX_TOKENS
        self.is_encoder_decoder = False
        self.dcp_size, self.dcp_rank, self.cp_interleave = shards, rank, 1
        for name in (
            *("pcp_manager", "pooling_runner", "pp_handler", "encoder_cache", "sampler"),
            *("prompt_logprobs_worker", "adaptive_verification", "speculator"),
        ):
            setattr(self, name, None)
        ignore = lambda *args, **kwargs: None  # noqa: E731
        self.model_state = SimpleNamespace(
            add_request=ignore, remove_request=ignore, apply_staged_writes=ignore
        )
        self.lora_state = SimpleNamespace(add_request=ignore, remove_request=ignore)
        self.kv_block_zeroer = SimpleNamespace(zero_block_ids=ignore)
        self.is_last_pp_rank = False
        self.kv_caches: list[torch.Tensor] = []
        self.attn_groups: list[Any] = []
        self.req_states = RequestState(MAX_REQS, MAX_LEN, MAX_TOKENS, 0, 128, CPU)
        self.damage: Callable[[tuple[torch.Tensor, ...], torch.Tensor, Any], None] | None = None

    def initialize_kv_cache(self, kv_cache_config: Any, width_error: int = 0) -> None:
        """Make the tables by vLLM's own widths; ``width_error`` is added to the first."""
        self.kv_cache_config = kv_cache_config
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        widths = [
            get_block_table_width(
                spec.max_num_blocks_per_req(self.vllm_config, MAX_LEN),
                spec.block_size,
                token_alignment=spec.block_table_token_alignment,
            )
            for spec in specs
        ]
        widths[0] += width_error
        self.block_tables = _tables(
            block_sizes=[spec.block_size for spec in specs],
            max_num_reqs=MAX_REQS,
            max_num_batched_tokens=MAX_TOKENS,
            max_num_blocks_per_group=widths,
            device=CPU,
            cp_size=self.dcp_size,
            cp_rank=self.dcp_rank,
            cp_interleave=self.cp_interleave,
            slot_mapping_enabled=[not isinstance(spec, MambaSpec) for spec in specs],
            dcp_sharded=[spec.dcp_sharded for spec in specs],
            sliding_window_reach=[
                spec.num_retained_tokens if isinstance(spec, SlidingWindowSpec) else 0
                for spec in specs
            ],
        )

    def execute_model(self, scheduler_output: Any) -> Any:
        """Follow the scheduler, prepare a batch and its tables, and compute nothing."""
        self.finish_requests(scheduler_output)
        self.add_requests(scheduler_output)
        self.update_requests(scheduler_output)
        self.block_tables.apply_staged_writes()
        if not scheduler_output.total_num_scheduled_tokens:
            return None
        batch = self._batch(scheduler_output.num_scheduled_tokens)
        self.prepare_attn(batch)
        computed = self.req_states.num_computed_tokens.gpu
        computed[batch.idx_mapping] += batch.query_start_loc.diff().int()[: batch.num_reqs]
        return batch

    def _batch(self, scheduled: dict[str, int]) -> Any:
        names = list(scheduled)
        rows = np.array([self.req_states.req_id_to_index[name] for name in names])
        idx_mapping = torch.from_numpy(rows)
        queries = torch.tensor([scheduled[name] for name in names])
        computed = self.req_states.num_computed_tokens.gpu[idx_mapping]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]).int()
        tokens = int(starts[-1])
        padded = min(tokens + 3, MAX_TOKENS)
        positions = torch.zeros(padded, dtype=torch.int64)
        positions[:tokens] = torch.cat(
            [
                torch.arange(first, first + count)
                for first, count in zip(computed, queries, strict=True)
            ]
        )
        return SimpleNamespace(
            req_ids=names,
            num_reqs=len(names),
            num_reqs_after_padding=min(len(names) + 1, MAX_REQS),
            num_tokens_after_padding=padded,
            idx_mapping=idx_mapping,
            query_start_loc=starts,
            positions=positions,
            seq_lens=(computed + queries).int(),
        )


class DamagedRunner(Runner):
    """A runner whose tables can be damaged before anybody checks them."""

    def prepare_attn(self, input_batch: Any) -> Any:
        prepared = super().prepare_attn(input_batch)
        if self.damage is not None:
            self.damage(*prepared, input_batch)
        return prepared


class Engine:
    """A scheduler and a runner, and random requests for them."""

    def __init__(
        self, folder: Path, specs: Sequence[Any], *, seed: int, shards: int = 1, rank: int = 0
    ) -> None:
        self.draw = random.Random(seed)
        is_hybrid = any(isinstance(spec, MambaSpec) for spec in specs)
        self.config = _config(folder, is_hybrid=is_hybrid, shards=shards)
        self.kv_cache_config = KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)
            ],
        )
        self.config.cache_config.num_gpu_blocks = NUM_BLOCKS
        size = BLOCK * shards
        self.scheduler = Scheduler(
            self.config,
            self.kv_cache_config,
            StructuredOutputManager(self.config),
            block_size=size,
            hash_block_size=size,
        )
        init_none_hash(lambda value: repr(value).encode())
        self.hasher = get_request_block_hasher(size, lambda value: repr(value).encode())
        self.runner = DamagedRunner(self.config, shards=shards, rank=rank)
        self.prompts: list[list[int]] = []
        self.count = 0
        self.most_requests = MAX_REQS + 2
        self.steps = 0

    def start(self, width_error: int = 0) -> None:
        """Make the runner's tables."""
        self.runner.initialize_kv_cache(self.kv_cache_config, width_error)

    def step(self) -> Any:
        """Admit some requests, run one step, and sample; return the runner's batch."""
        self.steps += 1
        while len(self.scheduler.requests) < self.most_requests and self.draw.random() < 0.4:
            self._add()
        if self.scheduler.requests and self.draw.random() < 0.01:
            name = self.draw.choice(list(self.scheduler.requests))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        output = self.scheduler.schedule()
        batch = self.runner.execute_model(output)
        if batch is None:
            return None
        sampled = []
        for name in batch.req_ids:
            request = self.scheduler.requests[name]
            is_done = request.num_computed_tokens >= request.num_tokens
            sampled.append([self.draw.randrange(3, 128)] if is_done else [])
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=batch.req_ids,
                req_id_to_index={name: at for at, name in enumerate(batch.req_ids)},
                sampled_token_ids=sampled,
            ),
        )
        return batch

    def _add(self) -> None:
        if self.prompts and self.draw.random() < 0.5:
            # the beginning of an earlier prompt: a hit in the prefix cache
            earlier = self.draw.choice(self.prompts)
            prompt = earlier[: self.draw.randint(1, len(earlier))]
        else:
            prompt = []
        prompt = prompt + [self.draw.randrange(3, 128) for _ in range(self.draw.randint(1, 120))]
        prompt = prompt[: MAX_LEN - 140]
        self.prompts = [*self.prompts[-20:], prompt]
        self.count += 1
        parameters = SamplingParams(max_tokens=self.draw.randint(1, 90), ignore_eos=True)
        self.scheduler.add_request(
            Request(f"request-{self.count}", prompt, parameters, None, block_hasher=self.hasher)
        )


def _config(folder: Path, *, is_hybrid: bool, shards: int) -> VllmConfig:
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
            async_scheduling=False,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
    )
    if is_hybrid:
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.mamba_block_size = BLOCK
    config.parallel_config.decode_context_parallel_size = shards
    return config
