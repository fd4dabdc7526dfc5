"""How many files, functions and calls of the four packages one decode step passes through.

``python -m benchmarks.step_calls`` counts a step of the built-in model, which has the three kinds
of group, on a CPU: four requests, one and two steps in flight.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from bt_runner import Engine, SamplingParams, hybrid_config, random_weights
from bt_width import ServingLimits

PACKAGES = ("bt_width", "bt_tables", "bt_builders", "bt_runner")


def report_calls(what: str, step: Callable[[], object]) -> None:
    """Run ``step`` once, and print what of the packages it passes through, with calls a file."""
    calls_of: Counter[str] = Counter()
    functions: set[tuple[str, str]] = set()
    depth = deepest = 0

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth, deepest
        path = Path(frame.f_code.co_filename)
        package = next((name for name in PACKAGES if name in path.parts), None)
        if package is None or event not in ("call", "return"):
            return
        if event == "return":
            depth -= 1
            return
        depth += 1
        deepest = max(deepest, depth)
        name = "/".join(path.parts[path.parts.index(package) :])
        calls_of[name] += 1
        functions.add((name, frame.f_code.co_qualname))

    sys.setprofile(watch)
    try:
        step()
    finally:
        sys.setprofile(None)
    print(
        f"{what}: {len(calls_of)} files, {len(functions)} functions, {calls_of.total()} calls, "
        f"{deepest} deep"
    )
    for name, num_calls in sorted(calls_of.items()):
        print(f"  {name} {num_calls}")


def main() -> None:
    """Count a step of the built-in model."""
    config = hybrid_config()
    weights = random_weights(config, seed=0, dtype=torch.float32)
    limits = ServingLimits(max_model_len=256, max_num_reqs=8, max_num_batched_tokens=64)
    for num_in_flight in (1, 2):
        engine = Engine(config, weights, limits, max_steps_in_flight=num_in_flight)
        for token in range(4):
            engine.add_request([1, 2, token], SamplingParams(max_new_tokens=64))
        for _ in range(10):
            engine.step()
        report_calls(f"a decode step, {num_in_flight} in flight", engine.step)


if __name__ == "__main__":
    main()
