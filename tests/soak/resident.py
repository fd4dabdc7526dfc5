"""The resident memory of this process, watched: it may not grow once all is warm."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from statistics import median

from bt_runner.errors import BadInputError

_STATM = Path("/proc/self/statm")

WARM_UP = 0.25
"""The share of a run whose samples do not count."""


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory.

    Raises:
        BadInputError: This system does not say.
    """
    if not _STATM.exists():
        raise BadInputError(f"resident memory is read from {_STATM}, which this system lacks")
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class ResidentMemory:
    """Samples of the resident memory, and how much it grew."""

    def __init__(self) -> None:
        """Start without a sample."""
        self._samples: list[int] = []

    def sample(self) -> None:
        """Measure now, when all garbage is collected."""
        gc.collect()
        self._samples.append(resident_bytes())

    @property
    def last(self) -> int:
        """The bytes of the last sample."""
        return self._samples[-1]

    @property
    def growth_percent(self) -> float:
        """How much more there is in the last quarter of the samples than in the first warm one."""
        warm = self._samples[int(len(self._samples) * WARM_UP) :]
        quarter = max(len(warm) // 4, 1)
        return 100.0 * (median(warm[-quarter:]) / median(warm[:quarter]) - 1.0)
