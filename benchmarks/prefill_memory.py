"""Memory and time of a prefill of sparse layers, by the tokens of a step: one process each.

A layer with an indexer of its own and one that shares its choice, as GLM has them. The peak is
what the process holds at most while it reads the prompt, less what it held before; beside it
stands what the residual stream and the other tensors of a whole step take, which no piece makes
smaller.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from bt_runner import Engine, ModelConfig, SamplingParams, random_weights
from bt_runner.models.config import MLA, MLP, AttentionLayer, SelectShared, SelectTopK
from bt_runner.models.layers.numerics import Rope
from bt_width import ServingLimits

MIB = 2**20


def main() -> None:
    """Print a line for each number of tokens a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunk", type=int, nargs="+", default=[512, 2_048, 8_192])
    parser.add_argument("--prompt", type=int, default=8_192)
    parser.add_argument("--topk", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--latent", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--workspace-mib", type=int, default=256)
    parser.add_argument("--measure", action="store_true", help="of the first chunk, here: as JSON")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(_measure(args)))
        return
    print(
        f"torch {torch.__version__}, one thread, float32: 2 sparse layers, {args.heads} heads of "
        f"{args.latent} + 64, topk {args.topk}, prompt {args.prompt:,}, workspace "
        f"{args.workspace_mib} MiB"
    )
    print("tokens a step   peak MiB   of a whole step   unbounded   seconds")
    for chunk in args.chunk:
        found = in_a_process(*sys.argv[1:], "--chunk", str(chunk))
        print(
            f"{chunk:13,} {found['peak'] / MIB:10.0f} {found['activations'] / MIB:17.0f} "
            f"{found['unbounded'] / MIB:11,.0f} {found['seconds']:9.1f}",
            flush=True,
        )


def in_a_process(*options: str) -> dict[str, float]:
    """Measure in a process of its own: its peak is of this prefill alone."""
    command = [sys.executable, "-m", "benchmarks.prefill_memory", *options, "--measure"]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))


def _measure(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    chunk, config = args.chunk[0], _config(args)
    weights = random_weights(config, seed=0, dtype=torch.float32)
    limits = ServingLimits(
        max_model_len=args.prompt + 1, max_num_reqs=1, max_num_batched_tokens=chunk
    )
    engine = Engine(
        config, weights, limits, workspace_bytes=args.workspace_mib * MIB, max_steps_in_flight=1
    )
    _run(engine, min(32, args.prompt))
    before = _peak_bytes()
    started = time.process_time()
    _run(engine, args.prompt)
    seconds = time.process_time() - started
    mla = config.layers[0].mla  # type: ignore[union-attr]  # both layers are attention
    row = mla.kv_lora_rank + mla.rope.dim
    return {
        "peak": _peak_bytes() - before,
        # streams, what the layers have put out, latents, and positions chosen as 64-bit numbers
        "activations": 4 * chunk * (8 * args.hidden + 2 * row) + 8 * chunk * args.topk,
        # the rows of all tokens as read, masked and widened, beside scores of all heads
        "unbounded": 4 * chunk * (3 * args.topk * row + args.heads * args.prompt),
        "seconds": seconds,
    }


def _config(args: argparse.Namespace) -> ModelConfig:
    rope = Rope(dim=64)
    mla = MLA(
        num_heads=args.heads,
        q_lora_rank=256,
        kv_lora_rank=args.latent,
        nope_dim=64,
        v_dim=64,
        rope=rope,
    )
    indexer = SelectTopK(num_heads=args.heads, head_dim=64, topk=args.topk, rope=rope)
    mlp = MLP(intermediate_size=2 * args.hidden)
    layers = [
        AttentionLayer(mla=mla, selection=selection, feed_forward=mlp)
        for selection in (indexer, SelectShared())
    ]
    return ModelConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        layers=tuple(layers),
        max_positions=args.prompt + 1,
    )


def _run(engine: Engine, num_tokens: int) -> None:
    prompt = torch.randint(256, (num_tokens,), generator=torch.Generator().manual_seed(0))
    engine.add_request(prompt.tolist(), SamplingParams(max_new_tokens=1))
    while engine.has_work:
        engine.step()


def _peak_bytes() -> int:
    """Return what Linux says; ``ru_maxrss`` begins with the peak of whoever started the process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
