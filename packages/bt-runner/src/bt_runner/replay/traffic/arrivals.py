"""When the requests of a trace come: as soon as there is room, or at the trace's own pace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bt_runner.replay.traffic.trace import TraceRequest


class Arrivals:
    """Hands out a trace's requests in order.

    Attributes:
        step_ms: What a step takes, in the trace's milliseconds; None where requests do
            not wait for their time.
    """

    def __init__(self, requests: Iterable[TraceRequest], step_ms: float | None = None) -> None:
        """Start at the arrival of the first request."""
        self.step_ms = step_ms
        self._requests: Iterator[TraceRequest] = iter(requests)
        self._next = next(self._requests, None)
        self._now = self._next.arrival_ms if self._next else 0.0

    @property
    def is_over(self) -> bool:
        """Whether all requests came."""
        return self._next is None

    def take(self) -> TraceRequest | None:
        """Return the next request if it is there by now."""
        request = self._next
        if request is None or (self.step_ms is not None and request.arrival_ms > self._now):
            return None
        self._next = next(self._requests, None)
        return request

    def pass_step(self) -> None:
        """Let the time of one step pass."""
        self._now += self.step_ms or 0.0

    def pass_idle(self) -> None:
        """Move the clock to the next arrival, as no request is running or waiting."""
        if self._next is not None:
            self._now = max(self._now, self._next.arrival_ms)
