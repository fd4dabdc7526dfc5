"""The demo: real text through the built-in hybrid, decoded in blocks and checked without."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

import torch

from bt_runner.cuda_graphs import GraphOptions
from bt_runner.demo.check import Verdict, check_request, near_tie_bound
from bt_runner.demo.prompts import Prompt, installed_prompts, read_prompts
from bt_runner.demo.report import groups_table, print_check, print_summary, requests_table
from bt_runner.dense import DenseModel
from bt_runner.devices import find_device
from bt_runner.engine import Engine
from bt_runner.errors import BadInputError
from bt_runner.memory import memory_refused
from bt_runner.models.caches import CacheOptions
from bt_runner.models.config import hybrid_config
from bt_runner.models.sharding import Ranks
from bt_runner.models.weights import random_weights
from bt_runner.processes import joined_ranks
from bt_runner.recorder import Recorder
from bt_runner.requests import Request, SamplingParams
from bt_runner.terminal.running import one_thread, progress_bar, tell_why_nothing_is_shared
from bt_width import ContextParallel, ServingLimits

MAX_MODEL_LEN = 4_096
STEPS_BETWEEN_ARRIVALS = 2
GRAPH_SIZES = (1, 2, 4)
"""Requests of captured steps; the largest batch is one more."""
_LATE = 4
"""Requests that ended last: blocks of those before may have been needed since."""
_ANSWER = b"\n\nAnd what follows from it?"


@memory_refused()
def run(args: argparse.Namespace) -> int:
    """Decode all prompts; return 0, or 1 where one of them does not match the reference.

    Several processes that torchrun started share the attention caches and decode together;
    the first of them prints and checks.

    Raises:
        BadInputError: A file or a device cannot be used.
        RequestRefusedError: A prompt is too long, or a pool too small for it.
    """
    device = find_device(args.device)
    if args.graphs and device.type != "cuda":
        raise BadInputError(f"CUDA graphs need a CUDA device, not {device}", device=str(device))
    prompts = read_prompts(args.prompts) if args.prompts else installed_prompts()
    threads = one_thread() if device.type == "cpu" else nullcontext()
    with threads, joined_ranks(device.type) as ranks:
        quiet = redirect_stdout(None) if ranks.rank else nullcontext()
        with quiet:
            is_well = _run_on(device, ranks, prompts, args)
    return 0 if is_well else 1


def _run_on(
    device: torch.device,
    ranks: Ranks,
    prompts: Sequence[Prompt],
    args: argparse.Namespace,
) -> bool:
    config = hybrid_config()
    dtype = getattr(torch, args.dtype)
    weights = random_weights(config, seed=args.seed, dtype=dtype, device=device)
    engine = Engine(
        config,
        weights,
        _limits(args, ranks),
        # states are kept at the ends of blocks, so that a second turn begins with them
        options=CacheOptions(mamba_mode="align"),
        num_blocks=args.num_blocks,
        ranks=ranks,
        graphs=GraphOptions(batch_sizes=(*GRAPH_SIZES, args.max_num_seqs) if args.graphs else ()),
        sanitizes=args.sanitize,
        prefix_caching=not args.no_prefix_caching,
        workspace_bytes=args.workspace,
    )
    if ranks.rank == 0:
        tell_why_nothing_is_shared(engine.prefixes)
    place = f"{device}" if ranks.size == 1 else f"{ranks.size} ranks, {device.type}"
    print(f"bt-runner demo on {place}, {args.dtype}\n")
    print(groups_table(engine))
    print()
    recorder = Recorder()
    checks = not args.no_check and ranks.rank == 0
    if checks:
        engine.observe(recorder)
    started = time.perf_counter()
    requests = _decode(engine, prompts, args.max_new_tokens)
    names = [prompt.name for prompt in prompts]
    turn = None if args.prompts else _second_turn(engine, requests, args.max_new_tokens)
    if turn is not None:
        first, tokens = turn
        requests += _decode(engine, [Prompt("second turn", tokens)], args.max_new_tokens)
        names.append(f"second turn of {requests[first].request_id}")
    seconds = time.perf_counter() - started
    print(requests_table(requests, names))
    print()
    print_summary(engine, requests, seconds, on_host=device.type == "cpu")
    if not checks:
        return True
    verdicts = _check(DenseModel(config, weights), requests, recorder)
    return print_check(verdicts, near_tie_bound(dtype))


def _limits(args: argparse.Namespace, ranks: Ranks) -> ServingLimits:
    return ServingLimits(
        max_model_len=args.max_model_len or MAX_MODEL_LEN,
        max_num_reqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        context_parallel=ContextParallel(
            size=ranks.size, rank=ranks.rank, interleave=args.interleave
        ),
    )


def _decode(engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Request]:
    """Run all requests, which arrive one by one while others run."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    for prompt in prompts:
        engine.new_request(prompt.token_ids, params)
    arrivals = list(prompts)
    requests: list[Request] = []
    first_step = engine.num_steps
    with progress_bar() as progress:
        bar = progress.add_task("decoding", total=len(prompts) * max_new_tokens)
        while arrivals or engine.has_work:
            # steps are what arrivals wait for, and an idle engine takes none
            is_due = engine.num_steps >= first_step + STEPS_BETWEEN_ARRIVALS * len(requests)
            if arrivals and (is_due or not engine.has_work):
                requests.append(engine.add_request(arrivals.pop(0).token_ids, params))
            outputs = engine.step()
            progress.advance(bar, sum(len(output.new_tokens) for output in outputs))
    return requests


def _second_turn(
    engine: Engine, requests: Sequence[Request], max_new_tokens: int
) -> tuple[int, list[int]] | None:
    """Return the request that is continued, and its tokens: a long one that ended lately."""
    longest, further = engine.layouts[0].limits.max_model_len, len(_ANSWER) + max_new_tokens
    late = range(max(len(requests) - _LATE, 0), len(requests))
    fitting = [index for index in late if requests[index].num_tokens + further <= longest]
    if not fitting:
        return None
    first = max(fitting, key=lambda index: requests[index].num_tokens)
    return first, requests[first].tokens + list(_ANSWER)


def _check(model: DenseModel, requests: Sequence[Request], recorder: Recorder) -> list[Verdict]:
    verdicts = []
    with progress_bar() as progress:
        for request in progress.track(requests, description="checking"):
            observations = recorder.observations[request.request_id]
            verdicts.append(check_request(model, request, observations))
    return verdicts
