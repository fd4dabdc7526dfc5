"""How long the host works: the time of its steps, without its waits for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class HostClock:
    """Adds up what the host spends on its own work.

    Attributes:
        seconds: The sum so far.
    """

    def __init__(self) -> None:
        """Start at nothing."""
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside, which is inside ``running``, out again."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds -= time.perf_counter() - began
