"""Many runs of places as one array of places; it knows nothing of what lies there."""

from __future__ import annotations

import numpy as np

from .._launch.arrays import IntArray


def run_places(starts: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Return every place of many runs, one after the other, and where each run then starts.

    Args:
        starts: First place of each run, of any shape.
        lengths: Places of each run, of that shape.
    """
    flat = lengths.reshape(-1).astype(np.int64)
    ends = flat.cumsum()
    moved_to = ends - flat
    total = int(ends[-1]) if ends.size else 0
    places = np.arange(total) + np.repeat(starts.reshape(-1) - moved_to, flat)
    return places, moved_to.reshape(lengths.shape)
