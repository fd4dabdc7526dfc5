"""Notes the steps of an engine for a page of charts; it knows no workload."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from bt_runner.engine import EngineLoop
from bt_runner.input_batch import InputBuffers
from bt_runner.report.series import StepRecorder, StepTotals
from bt_runner.scheduler import Scheduler
from bt_tables.devices import CpuExecutor

# What is counted: the call that does it, and how much of it one call does.
COUNTED: tuple[tuple[str, type, str, Callable[..., int]], ...] = (
    ("bytes", CpuExecutor, "copy", lambda _, executor, target, source: source.nbytes),
    ("bytes", InputBuffers, "_send", lambda _, buffers, slot, end: end * slot.words.itemsize),
    ("prompt tokens", Scheduler, "add", lambda _, scheduler, request: request.prompt_len),
)


class NotedSteps:
    """Steps an engine, and notes what each step did.

    Attributes:
        recorder: The steps so far.
    """

    def __init__(
        self,
        loop: EngineLoop,
        groups: Sequence[str],
        phases: Sequence[str],
        seconds: Callable[[], Sequence[float]],
    ) -> None:
        """Start with no step.

        Args:
            loop: The engine.
            groups: Names of its cache groups.
            phases: Names of the phases of a step.
            seconds: Returns what each phase has taken so far, in seconds.
        """
        pool_blocks = [pool.capacity for pool in loop.pools]
        self.recorder = StepRecorder(groups, pool_blocks, (*phases, "the rest"))
        self._loop = loop
        self._seconds = seconds
        self._counts: Counter[str] = Counter()
        self._hits_before = loop.prefixes.hit_tokens

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what happens inside."""
        with ExitStack() as stack:
            for name, owner, method, amount in COUNTED:
                counted = self._counted(name, getattr(owner, method), amount)
                stack.enter_context(mock.patch.object(owner, method, counted))
            yield

    def step(self) -> None:
        """Run a step and note it."""
        before, began = self._seconds(), time.perf_counter()
        self._loop.step()
        took = time.perf_counter() - began
        phases = [now - then for now, then in zip(self._seconds(), before, strict=True)]
        scheduler = self._loop._scheduler
        self.recorder.note(
            StepTotals(
                used_blocks=[pool.num_used for pool in self._loop.pools],
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                preemptions=scheduler.num_preemptions,
                prompt_tokens=self._counts["prompt tokens"],
                hit_tokens=self._loop.prefixes.hit_tokens - self._hits_before,
                num_bytes=self._counts["bytes"],
                phase_seconds=(*phases, max(took - sum(phases), 0.0)),
            )
        )

    def _counted(
        self, name: str, call: Callable[..., Any], amount: Callable[..., int]
    ) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            result = call(*args, **named)
            self._counts[name] += amount(result, *args, **named)
            return result

        return counted
