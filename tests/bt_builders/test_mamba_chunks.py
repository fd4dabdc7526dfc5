"""Chunks of the scan never cross requests, and the first completes one begun before."""

import random

import numpy as np
import pytest

from bt_builders.mamba import cut_chunks

pytestmark = pytest.mark.fast


def plain_chunks(
    query_lens: list[int], computed: list[int], chunk_size: int
) -> tuple[list[int], list[int], list[int]]:
    """The same cut, chunk by chunk."""
    bounds, last, owners = [0], [], []
    for req, (query_len, begun) in enumerate(zip(query_lens, computed, strict=True)):
        left = query_len
        position = begun
        while left:
            size = min(left, chunk_size - position % chunk_size)
            bounds.append(bounds[-1] + size)
            owners.append(req)
            left, position = left - size, position + size
        last.append(len(owners) - 1 if query_len else -1)
    return bounds, last, owners


@pytest.mark.parametrize(
    ("query_lens", "computed", "bounds"),
    [
        pytest.param([8], [0], [0, 8], id="one-full"),
        pytest.param([9], [0], [0, 8, 9], id="one-more"),
        pytest.param([7], [0], [0, 7], id="one-less"),
        pytest.param([10], [5], [0, 3, 10], id="completes-one-begun"),
        pytest.param([2], [5], [0, 2], id="does-not-complete-it"),
        pytest.param([11], [16], [0, 8, 11], id="begins-at-a-whole-one"),
        pytest.param([3, 9], [0, 7], [0, 3, 4, 12], id="two-requests"),
        pytest.param([], [], [0], id="none"),
    ],
)
def test_chunks_are_cut_at_the_requests_own_positions(
    query_lens: list[int], computed: list[int], bounds: list[int]
) -> None:
    cut = cut_chunks(np.array(query_lens, np.int32), np.array(computed, np.int32), 8)

    assert cut.cu_chunk_seqlens.tolist() == bounds


@pytest.mark.parametrize("seed", range(10))
def test_random_cuts_equal_the_plain_ones(seed: int) -> None:
    draw = random.Random(seed)
    chunk_size = draw.choice([1, 3, 8, 64])
    query_lens = [draw.choice([0, 1, 5, draw.randint(1, 200)]) for _ in range(20)]
    computed = [draw.randint(0, 100) for _ in query_lens]

    cut = cut_chunks(np.array(query_lens, np.int32), np.array(computed, np.int32), chunk_size)

    assert tuple(array.tolist() for array in cut) == plain_chunks(query_lens, computed, chunk_size)
    assert {array.dtype for array in cut} == {np.dtype(np.int32)}
