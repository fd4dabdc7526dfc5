"""Tokens per second beside transformers' ``generate``: three families, one thread of a CPU.

Random float32 models of about 60 million parameters, prompts of 128 tokens, 64 new ones. The
tokens come first: where they differ there is no time. Processor time, best and median of runs
that take turns, so that what else the machine does meets both.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bt_runner import Engine, SamplingParams
from bt_runner.models.checkpoint import load_weights, read_config
from bt_width import ServingLimits

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PROMPT, NEW = 128, 64

_COMMON: dict[str, Any] = {
    "vocab_size": 8_192,
    "hidden_size": 768,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.05,
}
_MLA: dict[str, Any] = _COMMON | {
    "num_hidden_layers": 8,
    "intermediate_size": 2_048,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 512,
}
_INDEXER = {"index_topk": 64, "index_n_heads": 16, "index_head_dim": 32}
_MAMBA = _COMMON | {
    "num_hidden_layers": 12,
    "num_heads": 24,
    "head_dim": 64,
    "state_size": 64,
    "n_groups": 1,
    "expand": 2,
    "chunk_size": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mla": ("DeepseekV3Config", _MLA),
    "dsa": ("DeepseekV32Config", _MLA | _INDEXER),
    "mamba2": ("Mamba2Config", _MAMBA),
}


def main() -> None:
    """Print a line for each family and batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=list(FAMILIES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="of our operations, once")
    args = parser.parse_args()
    torch.set_num_threads(1)
    version = import_module("transformers").__version__
    print(
        f"{platform.machine()}, torch {torch.__version__}, transformers {version}, one thread, "
        f"float32; prompts of {PROMPT}, {NEW} new tokens; tokens per second of processor time"
    )
    print("family    params  batch     ours best/median   theirs best/median   best ratio")
    for family in args.family:
        with tempfile.TemporaryDirectory() as folder:
            theirs = _model(family)
            theirs.save_pretrained(folder)
            config = read_config(Path(folder))
            weights = load_weights(Path(folder), config, dtype=torch.float32)
        for batch in args.batch:
            _compare(family, theirs, config, weights, batch, args)


def _model(family: str) -> Any:
    transformers = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    name, fields = FAMILIES[family]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**fields)
    ).eval()


def _compare(
    family: str, theirs: Any, config: Any, weights: Any, batch: int, args: argparse.Namespace
) -> None:
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(8_192, (batch, PROMPT), generator=generator)
    limits = ServingLimits(
        max_model_len=256, max_num_reqs=batch, max_num_batched_tokens=batch * PROMPT
    )
    engine = Engine(config, weights, limits)
    params = SamplingParams(max_new_tokens=NEW)

    def run_ours() -> list[list[int]]:
        requests = [engine.add_request(prompt, params) for prompt in prompts.tolist()]
        while engine.has_work:
            engine.step()
        return [list(request.output) for request in requests]

    def run_theirs() -> list[list[int]]:
        with torch.inference_mode():
            found = theirs.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=NEW,
                do_sample=False,
            )
        return [list(tokens) for tokens in found[:, PROMPT:].tolist()]

    (ours, our_first), (other, their_first) = _timed(run_ours), _timed(run_theirs)
    if ours != other:
        equal = sum(a == b for a, b in zip(ours, other, strict=True))
        print(f"{family:8} batch {batch}: {equal} of {batch} texts are equal, so no time is given")
        return
    if args.profile:
        with torch.profiler.profile() as profile:
            run_ours()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
    seconds = {"ours": [our_first], "theirs": [their_first]}
    for _ in range(args.runs - 1):
        seconds["ours"].append(_timed(run_ours)[1])
        seconds["theirs"].append(_timed(run_theirs)[1])
    speeds = {
        name: (batch * NEW / min(times), batch * NEW / statistics.median(times))
        for name, times in seconds.items()
    }
    num_params = sum(weight.numel() for weight in weights.values()) / 1e6
    print(
        f"{family:8} {num_params:5.1f} M {batch:6} {speeds['ours'][0]:11.1f} / "
        f"{speeds['ours'][1]:6.1f} {speeds['theirs'][0]:11.1f} / {speeds['theirs'][1]:6.1f} "
        f"{speeds['ours'][0] / speeds['theirs'][0]:12.2f}",
        flush=True,
    )


def _timed(work: Callable[[], list[list[int]]]) -> tuple[list[list[int]], float]:
    """Return what ``work`` gives, and its processor time."""
    gc.collect()
    started = time.process_time()
    found = work()
    return found, time.process_time() - started


if __name__ == "__main__":
    main()
