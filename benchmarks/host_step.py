"""What the host spends on a decode step of the engine, phase by phase.

Schedule, stage, table update, input batch, metadata of all builders, account. Launches, copies'
contents and the model are left out: a stand-in carries nothing out. Requests decode steadily,
and each gains a block every 64 steps; then one request arrives and one ends in every step.
The time of a fixed loop in plain Python says how fast the machine is.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from benchmarks.host_speed import python_speed
from benchmarks.step_calls import report_calls
from benchmarks.step_page import NotedSteps
from torch import Tensor

import bt_builders.drafts
import bt_builders.mamba
from bt_builders import (
    AttentionBackend,
    AttentionGroup,
    MambaMetadataBuilder,
    MLAMetadataBuilder,
    init_attention,
)
from bt_runner.cuda_graphs import GraphOptions
from bt_runner.engine import EngineLoop
from bt_runner.input_batch import InputBuffers
from bt_runner.kv_cache_manager import KVCacheManager, TableEdits
from bt_runner.model_runner import ModelRunner
from bt_runner.models.step import ModelStep
from bt_runner.report.page import require_report_library, write_report
from bt_runner.requests import Request, SamplingParams
from bt_runner.sampler import Sampling
from bt_runner.scheduler import Scheduler
from bt_tables import StagedBlockTables
from bt_tables.devices import CpuExecutor
from bt_width import AttentionSpec, CacheSpec, MambaSpec, MultipleOf, ServingLimits
from bt_width import SlidingWindowSpec as Window

BLOCK = 64
PROMPT = 16
SIZES = (64, 256, 1024, 4096)
SPECS: dict[str, tuple[CacheSpec, Any]] = {
    "attention": (AttentionSpec(block_size=BLOCK), MLAMetadataBuilder),
    "window": (Window(block_size=BLOCK, window=1024), MLAMetadataBuilder),
    "states": (MambaSpec(block_size=BLOCK, mode="align"), MambaMetadataBuilder),
}
Times = dict[str, list[float]]


class Nothing:
    """Launches no kernel: what is left of a builder is its host part."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return what does nothing, whatever it is called."""
        return lambda *_: None


class StandIn:
    """A model without arithmetic, whose steps may take the device some time."""

    def __init__(self) -> None:
        """Start with a device that takes no time."""
        self.hidden = torch.zeros(16_384, 1)

    def forward(self, step: ModelStep) -> list[Tensor]:
        """Return a residual stream that is not computed."""
        return [self.hidden[: len(step.token_ids)]]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return them as they are."""
        return hidden

    def copy_blocks(self, group: int, source_ids: Tensor, target_ids: Tensor) -> None:
        """Copy nothing."""


def choose(logits: Tensor, sampling: Sampling) -> Tensor:
    """Choose token 1 for everybody."""
    return torch.ones(len(sampling.indices), dtype=torch.int64)


@contextmanager
def carrying_nothing_out() -> Iterator[None]:
    """Let tables and builders launch nothing."""

    # plain functions: a mock would note every call, and keep what it was given
    def nothing(*_: Any, **__: Any) -> None:
        pass

    def no_launch(*_: Any, **__: Any) -> Callable[..., None]:
        return nothing

    def no_operations(*_: Any) -> Nothing:
        return Nothing()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(CpuExecutor, "step_launch", no_launch))
        stack.enter_context(mock.patch.object(CpuExecutor, "copy", nothing))
        for module in (bt_builders.drafts, bt_builders.mamba):
            stack.enter_context(mock.patch.object(module, "operations_for", no_operations))
        yield


def make_loop(
    num_reqs: int, num_groups: int, max_steps_in_flight: int = 2, *, prefix_caching: bool = True
) -> EngineLoop:
    """Return an engine for as many requests, with as many groups."""
    limits = ServingLimits(
        max_model_len=8192, max_num_reqs=num_reqs + 1, max_num_batched_tokens=16_384
    )
    groups = [
        AttentionGroup(
            name=name,
            spec=spec,
            backends=(
                AttentionBackend(
                    name=name,
                    builder_class=builder,
                    supported_kernel_block_sizes=(MultipleOf(1),),
                ),
            ),
        )
        for name, (spec, builder) in list(SPECS.items())[:num_groups]
    ]
    setup = init_attention(groups, limits, "cpu")
    sizes = [1 + 70 * (num_reqs + 1)] * num_groups
    kv = KVCacheManager(setup.layouts, sizes, prefix_caching=prefix_caching)
    runner = ModelRunner(
        setup,
        StandIn(),
        choose,
        tables=StagedBlockTables(
            setup.layouts,
            device="cpu",
            num_blocks=sizes,
            max_steps_in_flight=max_steps_in_flight,
        ),
        limits=limits,
        device=torch.device("cpu"),
        dtype=torch.float32,
        graphs=GraphOptions(),
        max_steps_in_flight=max_steps_in_flight,
    )
    return EngineLoop(runner, Scheduler(limits, kv), None, max_steps_in_flight)


class Arrivals:
    """Adds requests of different lengths, so that blocks fill at different times."""

    def __init__(self, loop: EngineLoop) -> None:
        """Add to ``loop``."""
        self._loop = loop
        self._draw = random.Random(0)
        self._count = 0

    def add(self, num_new: int = 3000) -> None:
        """Let one more request wait."""
        prompt = np.zeros(self._draw.randint(1, BLOCK), np.int32)
        params = SamplingParams(max_new_tokens=num_new)
        self._loop.add(Request(str(self._count), prompt, params))
        self._count += 1


class Phases:
    """The processor time that a step spends in each phase, without the phases inside it."""

    PARTS: tuple[tuple[str, type, str], ...] = (
        ("schedule", Scheduler, "schedule"),
        ("stage", TableEdits, "stage"),
        ("edits", KVCacheManager, "take_edits"),
        ("input batch", InputBuffers, "pack"),
        ("tables.step", StagedBlockTables, "step"),
        ("metadata", MLAMetadataBuilder, "build"),
        ("metadata", MambaMetadataBuilder, "build"),
        ("launched", Scheduler, "launched"),
        ("account", Scheduler, "update"),
    )

    def __init__(self) -> None:
        """Start with no time."""
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Add up what is spent inside."""
        with ExitStack() as stack:
            for name, owner, method in self.PARTS:
                call = getattr(owner, method)
                stack.enter_context(mock.patch.object(owner, method, self._timed(name, call)))
            yield

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return timed


def step_times(loop: EngineLoop, num_steps: int, before: Callable[[], None]) -> list[float]:
    """Return the processor time of each step in microseconds."""
    times = []
    for _ in range(num_steps):
        before()
        began = time.process_time_ns()
        loop.step()
        times.append((time.process_time_ns() - began) / 1e3)
    return times


def steady_loop(num_reqs: int, num_groups: int, *, prefix_caching: bool) -> EngineLoop:
    """Return an engine whose requests decode, one block past their prompts."""
    loop = make_loop(num_reqs, num_groups, prefix_caching=prefix_caching)
    arrivals = Arrivals(loop)
    for _ in range(num_reqs):
        arrivals.add()
    for _ in range(BLOCK):
        loop.step()
    return loop


def busy_loop(num_reqs: int, num_groups: int) -> tuple[EngineLoop, Callable[[], None]]:
    """Return an engine of which one request ends in every step, and what adds one."""
    loop = make_loop(num_reqs, num_groups)
    arrivals = Arrivals(loop)
    for place in range(num_reqs):
        arrivals.add(num_new=BLOCK + 4 + place)
    for _ in range(BLOCK):
        loop.step()
    return loop, lambda: arrivals.add(num_new=num_reqs)


def report(num_reqs: int, num_groups: int, num_steps: int, *, by_phase: bool) -> Times:
    """Print the times of one size and return them in microseconds, by what they are of."""
    plain_loop = steady_loop(num_reqs, num_groups, prefix_caching=False)
    loop = steady_loop(num_reqs, num_groups, prefix_caching=True)
    plain: list[float] = []
    steady: list[float] = []
    for _ in range(num_steps):
        # by turns, so that both see the machine in the same state
        plain += step_times(plain_loop, 1, lambda: None)
        steady += step_times(loop, 1, lambda: None)
    more = statistics.median(steady) / statistics.median(plain) - 1
    print(f"{num_reqs:6} requests, {num_groups} groups: steady {told(steady)}")
    print(f"{'':18}without prefix caching {told(plain)}; with it {more:+.0%} in the median")
    if by_phase:
        phases = Phases()
        with phases.watching():
            for _ in range(num_steps):
                loop.step()
        parts = [f"{name} {1e6 * took / num_steps:.0f}" for name, took in phases.seconds.items()]
        print(f"{'':25}{', '.join(parts)}")
    loop, add_one = busy_loop(num_reqs, num_groups)
    busy = step_times(loop, num_steps, add_one)
    print(f"{'':18}with one arrival and one end a step {told(busy)}")
    return {
        "steady": steady,
        "without prefix caching": plain,
        "one arrival and one end a step": busy,
    }


def write_page(path: Path, num_reqs: int, num_groups: int, num_steps: int, times: Times) -> None:
    """Write a page of a run with arrivals and ends, and the times of its size."""
    loop, add_one = busy_loop(num_reqs, num_groups)
    phases = Phases()
    names = list(dict.fromkeys(name for name, _, _ in Phases.PARTS))
    noted = NotedSteps(
        loop, list(SPECS)[:num_groups], names, lambda: [phases.seconds[name] for name in names]
    )
    with phases.watching(), noted.counting():
        for _ in range(num_steps):
            add_one()
            noted.step()
    title = f"{num_reqs:,} requests, {num_groups} groups: one arrival and one end a step"
    summary = {name: told(taken) for name, taken in times.items()}
    record = {name: percentiles(taken) for name, taken in times.items()}
    write_report(path, title, {**summary, "machine": machine()}, record, noted.recorder.series())


def told(times: list[float]) -> str:
    """Say the best, the median and the 99th percentile."""
    best, median, p99 = percentiles(times).values()
    return f"best {best:.0f} us, median {median:.0f}, p99 {p99:.0f}"


def percentiles(times: list[float]) -> dict[str, float]:
    """Return the best, the median and the 99th percentile."""
    p99 = float(np.percentile(times, 99))
    return {"best_us": min(times), "median_us": statistics.median(times), "p99_us": p99}


def machine() -> str:
    """Name the processor, Python and torch."""
    return f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"


def report_steps_in_flight(device_ms: float, host_ms: float) -> None:
    """Print how long steps take with one and with two in flight, on a device that takes time."""
    for max_steps in (1, 2):
        loop = make_loop(8, 1, max_steps)
        arrivals = Arrivals(loop)
        for _ in range(8):
            arrivals.add()
        ready = [time.perf_counter()]
        launch = loop._runner.launch

        def slow(*args: Any, launch: Any = launch, ready: Any = ready, **named: Any) -> Any:
            time.sleep(host_ms / 1e3)
            in_flight = launch(*args, **named)
            ready[0] = max(ready[0], time.perf_counter()) + device_ms / 1e3
            event = mock.Mock()
            due = ready[0]
            event.synchronize = lambda: time.sleep(max(due - time.perf_counter(), 0))
            object.__setattr__(in_flight, "event", event)
            return in_flight

        with mock.patch.object(loop._runner, "launch", slow):
            for _ in range(5):
                loop.step()
            began = time.perf_counter()
            for _ in range(50):
                loop.step()
            took = (time.perf_counter() - began) / 50
        print(f"{max_steps} in flight: {1e3 * took:.2f} ms a step")


def report_files() -> None:
    """Print the files, functions and calls of one decode step, in all packages."""
    loop = make_loop(8, 1)
    arrivals = Arrivals(loop)
    for _ in range(8):
        arrivals.add()
    for _ in range(BLOCK // 2):
        loop.step()
    report_calls("a decode step without its model", loop.step)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="measured a size (default: 200)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="running requests")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also write the last size as a page of charts, FILE.html (default: none)",
    )
    args = parser.parse_args(arguments)
    if args.report is not None:
        require_report_library()
    torch.set_num_threads(1)
    print(machine())
    print(f"a million turns of a plain loop: {python_speed():.1f} ms")
    with carrying_nothing_out():
        for num_groups in (1, 3):
            for num_reqs in args.sizes:
                times = report(num_reqs, num_groups, args.steps, by_phase=True)
        if args.report is not None:
            write_page(args.report, num_reqs, num_groups, args.steps, times)
        report_steps_in_flight(device_ms=5.0, host_ms=2.0)
        report_files()


if __name__ == "__main__":
    main()
