"""Requests come in order, at once or at their time."""

from __future__ import annotations

from bt_runner.replay.traffic.arrivals import Arrivals
from bt_runner.replay.traffic.trace import TraceRequest


def _requests(*arrivals_ms: float) -> list[TraceRequest]:
    return [
        TraceRequest(line=line, prompt_len=1, output_len=1, arrival_ms=arrival)
        for line, arrival in enumerate(arrivals_ms, start=1)
    ]


def _taken(arrivals: Arrivals) -> list[int]:
    lines = []
    while (request := arrivals.take()) is not None:
        lines.append(request.line)
    return lines


def test_without_a_step_time_all_are_there_at_once() -> None:
    arrivals = Arrivals(_requests(0.0, 500.0, 1e9))

    assert _taken(arrivals) == [1, 2, 3]
    assert arrivals.is_over


def test_with_a_step_time_each_waits_for_its_time() -> None:
    arrivals = Arrivals(_requests(1000.0, 1000.0, 1030.0, 1050.0), step_ms=25.0)

    taken = [_taken(arrivals)]
    for _ in range(2):
        arrivals.pass_step()
        taken.append(_taken(arrivals))

    assert taken == [[1, 2], [], [3, 4]]


def test_idle_time_passes_at_once() -> None:
    arrivals = Arrivals(_requests(0.0, 60_000.0), step_ms=25.0)
    first = _taken(arrivals)

    arrivals.pass_idle()

    assert (first, _taken(arrivals)) == ([1], [2])


def test_a_trace_without_requests_is_over() -> None:
    assert Arrivals([]).is_over
