"""The numbers of every step of a run, and how they are thinned for a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

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
