"""The numbers of every step of a run: noted as totals so far, and thinned for a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Seconds = NDArray[np.float64]

_BUCKETS = 120


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSeries:
    """What each of S steps did; arrays have a line a step.

    Attributes:
        groups: Names of the cache groups (G).
        pool_blocks: Blocks of each group's pool.
        used_blocks: [S, G] blocks in use.
        running: [S] requests that ran.
        waiting: [S] requests that waited.
        preempted: [S] requests that gave up their blocks.
        prompt_tokens: [S] prompt tokens of the requests that entered.
        hit_tokens: [S] those whose blocks were shared.
        bytes_sent: [S] bytes sent to the device.
        phases: Names of the parts of a step's host time (P).
        phase_seconds: [S, P] host time.
    """

    groups: tuple[str, ...]
    pool_blocks: tuple[int, ...]
    used_blocks: Counts
    running: Counts
    waiting: Counts
    preempted: Counts
    prompt_tokens: Counts
    hit_tokens: Counts
    bytes_sent: Counts
    phases: tuple[str, ...]
    phase_seconds: Seconds

    @property
    def num_steps(self) -> int:
        """Steps."""
        return len(self.running)

    @property
    def hit_share(self) -> Seconds:
        """[S] share of all prompt tokens so far that were hits; 0 before the first."""
        hits, prompts = np.cumsum(self.hit_tokens), np.cumsum(self.prompt_tokens)
        return np.asarray(hits / np.maximum(prompts, 1), dtype=np.float64)

    @property
    def preemptions(self) -> Counts:
        """The steps in which a request was preempted, counted from 0."""
        return np.flatnonzero(self.preempted)


def thinned(values: NDArray[np.int64] | NDArray[np.float64]) -> list[int]:
    """Return the steps whose values show a curve: the lowest and highest of each stretch.

    The first and the last step stay, and so does every minimum and maximum of a stretch, so
    that no peak is lost. A short curve stays whole.
    """
    num_steps = len(values)
    if num_steps <= 4 * _BUCKETS:
        return list(range(num_steps))
    return sorted({0, num_steps - 1, *_extremes(values)})


def _extremes(values: NDArray[np.int64] | NDArray[np.float64]) -> Iterator[int]:
    edges = np.linspace(0, len(values), _BUCKETS + 1).astype(int).tolist()
    for start, end in pairwise(edges):
        stretch = values[start:end]
        yield start + int(stretch.argmin())
        yield start + int(stretch.argmax())


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
