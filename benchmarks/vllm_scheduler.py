"""What vLLM's scheduler takes off the host in a step of steady decode, beside ``host_step``.

``schedule`` and ``update_from_output`` of vLLM 0.33 as they are, prefix caching on, one cache group
of blocks of 64; each request gains a block every 64 steps. Its input batch, block tables and
metadata are not in it. It runs where vLLM is installed: ``hatch run vllm:scheduler``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.host_speed import python_speed
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 64
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}


def main() -> None:
    """Print the processor time of each part of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="measured a size (default: 200)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256], help="running requests")
    args = parser.parse_args()
    print(f"a million turns of a plain loop: {python_speed():.1f} ms")
    for num_reqs in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            parts = steps_of(scheduler_of(Path(folder), num_reqs, args.steps), args.steps)
        for name, times in parts.items():
            best, median = min(times), statistics.median(times)
            worst = sorted(times)[int(0.99 * len(times))]
            print(
                f"{num_reqs:7} requests: {name:30} best {1e6 * best:.0f} us, median "
                f"{1e6 * median:.0f}, p99 {1e6 * worst:.0f}"
            )


def scheduler_of(folder: Path, num_reqs: int, num_steps: int) -> Any:
    """Return a scheduler with as many requests, each at another place of its block."""
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    longest = 2 * BLOCK + num_steps + 16
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=longest
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_reqs,
            max_num_batched_tokens=BLOCK * num_reqs,
            max_model_len=longest,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    num_blocks = num_reqs * (longest // BLOCK + 1) + 1
    caches = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)],
    )
    config.cache_config.num_gpu_blocks = num_blocks
    scheduler = Scheduler(
        config, caches, StructuredOutputManager(config), block_size=BLOCK, hash_block_size=BLOCK
    )
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(BLOCK, hash_fn)
    parameters = SamplingParams(max_tokens=num_steps + 8, ignore_eos=True)
    for number in range(num_reqs):
        prompt = [3 + (number + place) % 100 for place in range(1 + number % BLOCK)]
        scheduler.add_request(
            Request(f"request-{number}", prompt, parameters, None, block_hasher=hasher)
        )
    return scheduler


def steps_of(scheduler: Any, num_steps: int) -> dict[str, list[float]]:
    """Run steps, the prompts' first, and return the seconds of both calls in each."""
    schedule, update = [], []
    for step in range(num_steps + 4):
        began = time.process_time()
        output = scheduler.schedule()
        scheduled = time.process_time()
        names = list(output.num_scheduled_tokens)
        sampled = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[5]] * len(names),
        )
        ready = time.process_time()
        scheduler.update_from_output(output, sampled)
        updated = time.process_time()
        if step >= 4:
            schedule.append(scheduled - began)
            update.append(updated - ready)
    both = [sum(pair) for pair in zip(schedule, update, strict=True)]
    return {"schedule": schedule, "update_from_output": update, "both": both}


if __name__ == "__main__":
    main()
