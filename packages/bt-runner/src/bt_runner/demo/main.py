"""The demo: real text through the built-in hybrid, decoded in blocks and checked without."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bt_runner.demo.check import Verdict, check_request, near_tie_bound
from bt_runner.demo.prompts import Prompt, installed_prompts, read_prompts
from bt_runner.demo.report import groups_table, print_check, print_summary, requests_table
from bt_runner.dense import DenseModel
from bt_runner.devices import find_device
from bt_runner.engine import Engine
from bt_runner.errors import BadInputError
from bt_runner.graphs import GraphOptions
from bt_runner.models.hybrid import hybrid_config
from bt_runner.models.sharding import Ranks
from bt_runner.models.weights import random_weights
from bt_runner.observer import Recorder
from bt_runner.processes import joined_ranks
from bt_runner.request import Request, SamplingParams
from bt_width import ContextParallel, ServingLimits

MAX_MODEL_LEN = 4_096
MAX_NUM_REQS = 8
MAX_NUM_BATCHED_TOKENS = 512
STEPS_BETWEEN_ARRIVALS = 2
GRAPH_SIZES = (1, 2, 4, MAX_NUM_REQS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the user chose.

    Attributes:
        prompts: A file of prompts, or None for those found in the installation.
        max_new_tokens: Tokens written per request.
        device: Its name, or None for CUDA where there is one.
        dtype: Of the weights and caches.
        seed: Of the weights.
        max_model_len: Tokens of the longest request, or None for the demo's own.
        num_blocks: Blocks of each pool, the null block included, or None for enough.
        checks: Whether every request is compared with the dense reference.
        interleave: Consecutive tokens that stay on one rank, where there are several.
        uses_graphs: Whether decode steps are captured as CUDA graphs.
        sanitizes: Whether every step's tables are checked.
    """

    prompts: Path | None = None
    max_new_tokens: int = 32
    device: str | None = None
    dtype: str = "float64"
    seed: int = 0
    max_model_len: int | None = None
    num_blocks: int | None = None
    checks: bool = True
    interleave: int = 1
    uses_graphs: bool = False
    sanitizes: bool = False


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Decode all prompts; return whether they match the reference, or are not checked.

    Several processes that torchrun started share the attention caches and decode together;
    the first of them prints and checks.
    """
    device = find_device(options.device)
    prompts = read_prompts(options.prompts) if options.prompts else installed_prompts()
    with joined_ranks(device.type) as ranks:
        console.quiet = ranks.rank > 0
        return _run_on(device, ranks, prompts, options, console)


def _run_on(
    device: torch.device,
    ranks: Ranks,
    prompts: Sequence[Prompt],
    options: DemoOptions,
    console: Console,
) -> bool:
    config = hybrid_config()
    dtype = getattr(torch, options.dtype)
    weights = random_weights(config, seed=options.seed, dtype=dtype, device=device)
    context = ContextParallel(size=ranks.size, rank=ranks.rank, interleave=options.interleave)
    limits = ServingLimits(
        max_model_len=options.max_model_len or MAX_MODEL_LEN,
        max_num_reqs=MAX_NUM_REQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        context_parallel=context,
    )
    if options.uses_graphs and device.type != "cuda":
        raise BadInputError(f"CUDA graphs need a CUDA device, not {device}", device=str(device))
    graphs = GraphOptions(batch_sizes=GRAPH_SIZES if options.uses_graphs else ())
    engine = Engine(
        config,
        weights,
        limits,
        num_blocks=options.num_blocks,
        ranks=ranks,
        graphs=graphs,
        sanitizes=options.sanitizes,
    )
    place = f"{device}" if ranks.size == 1 else f"{ranks.size} ranks, {device.type}"
    console.print(f"bt-runner demo on {place}, {options.dtype}\n", highlight=False)
    console.print(groups_table(engine))
    console.print()
    recorder = Recorder()
    checks = options.checks and ranks.rank == 0
    if checks:
        engine.observe(recorder)
    started = time.perf_counter()
    requests = _decode(engine, prompts, options.max_new_tokens, console)
    seconds = time.perf_counter() - started
    console.print(requests_table(requests, [prompt.name for prompt in prompts]))
    console.print()
    print_summary(console, engine, requests, seconds)
    if not checks:
        return True
    verdicts = _check(DenseModel(config, weights), requests, recorder, console)
    return print_check(console, verdicts, near_tie_bound(dtype))


def _decode(
    engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int, console: Console
) -> list[Request]:
    """Run all requests, which arrive one by one while others run."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    for prompt in prompts:
        engine.new_request(prompt.token_ids, params)
    arrivals = list(prompts)
    requests: list[Request] = []
    with _progress(console) as progress:
        bar = progress.add_task("decoding", total=len(prompts) * max_new_tokens)
        while arrivals or engine.has_work:
            if arrivals and engine.num_steps >= STEPS_BETWEEN_ARRIVALS * len(requests):
                requests.append(engine.add_request(arrivals.pop(0).token_ids, params))
            outputs = engine.step()
            progress.advance(bar, sum(len(output.new_tokens) for output in outputs))
    return requests


def _check(
    model: DenseModel, requests: Sequence[Request], recorder: Recorder, console: Console
) -> list[Verdict]:
    verdicts = []
    with _progress(console) as progress:
        for request in progress.track(requests, description="checking"):
            observations = recorder.observations[request.request_id]
            verdicts.append(check_request(model, request, observations))
    return verdicts


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """Show a bar where there is a terminal, and nothing in a pipe."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress
