"""The tokens of running requests, which lie in chunks."""

from __future__ import annotations

import numpy as np
import pytest

from bt_runner.requests import Request, RunningRequests, SamplingParams


def _running(*lengths: int) -> tuple[RunningRequests, list[Request]]:
    """Return rows with requests of these lengths, all tokens different."""
    table = RunningRequests(len(lengths))
    requests = []
    for row, length in enumerate(lengths):
        tokens = np.arange(length, dtype=np.int32) + 10_000 * row
        requests.append(Request(str(row), tokens, SamplingParams(max_new_tokens=2000)))
        table.enter(row, requests[-1], 0)
    return table, requests


@pytest.mark.parametrize("size", [1, 16, 64, 96, 255, 256, 257, 600])
def test_a_span_is_the_same_wherever_the_chunks_end(size: int) -> None:
    table, _ = _running(1000, 700, 999)
    for row in range(3):
        tokens = table.tokens_of(row)
        for start in range(0, len(tokens) - size + 1, size):
            found = np.asarray(table.span(row, start, start + size))
            np.testing.assert_array_equal(found, tokens[start : start + size], strict=True)


def test_a_span_is_read_where_the_tokens_are_after_they_moved() -> None:
    """More chunks than there were are another piece of memory."""
    table, requests = _running(60, 60)
    for _ in range(20):
        counts = np.full(2, 100)
        table.append(np.arange(2), np.full((2, 100), 7, np.int32), counts)
    assert np.asarray(table.span(1, 30, 60)).tolist() == list(range(10_030, 10_060))
    assert np.asarray(table.span(0, 60, 2060)).tolist() == [7] * 2000
    assert requests[1].num_tokens == 2060


def test_each_row_takes_as_many_tokens_as_count() -> None:
    table, _ = _running(254, 255, 256, 3)
    tokens = np.arange(12, dtype=np.int32).reshape(4, 3)
    table.append(np.array([2, 0, 1, 3]), tokens, np.array([1, 3, 2, 3]))
    assert [table.tokens_of(row)[-3:].tolist() for row in (0, 1, 2, 3)] == [
        [3, 4, 5],
        [10_254, 6, 7],
        [20_254, 20_255, 0],
        [9, 10, 11],
    ]
