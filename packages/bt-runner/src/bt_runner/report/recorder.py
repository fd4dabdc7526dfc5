"""Collects the numbers of a run step by step, from totals so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bt_runner.report.series import Counts, StepSeries


class StepTotals(NamedTuple):
    """A run after one of its steps.

    Attributes:
        used_blocks: Blocks in use in each group, now.
        running: Requests that run, now.
        waiting: Requests that wait, now.
        preemptions: Preemptions so far.
        prompt_tokens: Prompt tokens of the requests that have entered so far.
        hit_tokens: Those found in the cache so far.
        num_bytes: Bytes sent to the device so far.
        phase_seconds: Host time of each phase of this step.
    """

    used_blocks: Sequence[int]
    running: int
    waiting: int
    preemptions: int
    prompt_tokens: int
    hit_tokens: int
    num_bytes: int
    phase_seconds: Sequence[float]


class StepRecorder:
    """Keeps the totals of each step, and gives them as the numbers of each step."""

    def __init__(
        self, groups: Sequence[str], pool_blocks: Sequence[int], phases: Sequence[str]
    ) -> None:
        """Take the names and pool sizes of the groups, and the names of a step's phases."""
        self._groups, self._pool_blocks = tuple(groups), tuple(pool_blocks)
        self._phases = tuple(phases)
        self._totals: list[StepTotals] = []

    def note(self, totals: StepTotals) -> None:
        """Keep the totals after a step."""
        self._totals.append(totals)

    def series(self) -> StepSeries:
        """Return the numbers of all steps noted."""
        used, running, waiting, preemptions, prompts, hits, num_bytes, seconds = (
            zip(*self._totals, strict=True) if self._totals else ((),) * len(StepTotals._fields)
        )
        return StepSeries(
            groups=self._groups,
            pool_blocks=self._pool_blocks,
            used_blocks=np.array(used, dtype=np.int64).reshape(-1, len(self._groups)),
            running=np.array(running, dtype=np.int64),
            waiting=np.array(waiting, dtype=np.int64),
            preempted=_differences(preemptions),
            prompt_tokens=_differences(prompts),
            hit_tokens=_differences(hits),
            bytes_sent=_differences(num_bytes),
            phases=self._phases,
            phase_seconds=np.array(seconds, dtype=np.float64).reshape(-1, len(self._phases)),
        )


def _differences(totals: Sequence[int]) -> Counts:
    counts = np.array([0, *totals], dtype=np.int64)
    return counts[1:] - counts[:-1]
