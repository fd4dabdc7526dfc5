"""The array types of the loop, and the one index computation that several modules share."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Flags: TypeAlias = NDArray[np.bool_]
Ints: TypeAlias = NDArray[np.int64]
Tokens: TypeAlias = NDArray[np.int32]


def ragged(starts: Ints, counts: Ints) -> Ints:
    """Return ``starts[i], starts[i] + 1, ...``, ``counts[i]`` of each, one after the other."""
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    numbers: Ints = np.arange(total) + np.repeat(starts - ends + counts, counts)
    return numbers
