"""Decodes end where the first request has too many tokens."""

import pytest
from tests.support.batches import Request, make_batch
from tests.support.plans import plan

from bt_builders import BatchSplit, split_decodes_and_prefills
from bt_width import AttentionSpec

pytestmark = pytest.mark.fast


def split(
    query_lens: list[int],
    threshold: int,
    *,
    uniform: bool = False,
    num_reqs: int | None = None,
    num_tokens: int | None = None,
    max_query_len: int | None = None,
) -> BatchSplit:
    layout = plan(AttentionSpec(block_size=16), 200)
    requests = [Request(20 + query_len, query_len) for query_len in query_lens]
    common = make_batch(
        layout, requests, num_reqs=num_reqs, num_tokens=num_tokens, max_query_len=max_query_len
    )
    return split_decodes_and_prefills(common, threshold, uniform=uniform)


@pytest.mark.parametrize(
    ("query_lens", "expected"),
    [
        pytest.param([], BatchSplit(0, 0, 0, True, 0, 0), id="none"),
        pytest.param([1, 1], BatchSplit(2, 2, 1, True, 0, 0), id="decodes"),
        pytest.param([1, 3, 2], BatchSplit(3, 6, 3, False, 0, 0), id="ragged"),
        pytest.param([9, 5], BatchSplit(0, 0, 0, True, 2, 14), id="prefills"),
        pytest.param([2, 2, 9], BatchSplit(2, 4, 2, True, 1, 9), id="both"),
        pytest.param([1, 9, 1], BatchSplit(1, 1, 1, True, 2, 10), id="decode-behind-prefill"),
        pytest.param([4, 0, 4], BatchSplit(3, 8, 4, False, 0, 0), id="a-row-without-tokens"),
    ],
)
def test_the_first_long_request_ends_the_decodes(
    query_lens: list[int], expected: BatchSplit
) -> None:
    assert split(query_lens, 4) == expected


def test_uniform_decodes_end_where_lengths_differ() -> None:
    assert split([2, 2, 1, 2], 4, uniform=True) == BatchSplit(2, 4, 2, True, 2, 3)


@pytest.mark.parametrize("num_reqs", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [4, 5, 7])
def test_padding_that_makes_no_whole_rows_is_no_uniform_decode(
    num_reqs: int, num_tokens: int
) -> None:
    ours = split([2, 2], 4, uniform=True, num_reqs=num_reqs, num_tokens=num_tokens)

    assert ours == BatchSplit(2, 4, 2, True, 0, 0)


def test_a_row_without_tokens_ends_uniform_decodes_unless_it_is_padding() -> None:
    assert split([2, 0, 2], 4, uniform=True).num_decodes == 1
    assert split([2, 2, 0], 4, uniform=True, num_tokens=6).num_decodes == 3


def test_padding_rows_of_a_decode_take_the_padding_tokens() -> None:
    assert split([2, 2], 4, num_reqs=4, num_tokens=8) == BatchSplit(4, 8, 2, True, 0, 0)


def test_padding_rows_that_get_too_few_tokens_are_not_uniform() -> None:
    assert not split([2, 2], 4, num_reqs=4, num_tokens=7).is_uniform


def test_padding_rows_behind_a_prefill_are_neither() -> None:
    assert split([1, 9], 4, num_reqs=4, num_tokens=16) == BatchSplit(1, 1, 1, True, 1, 9)


def test_a_dummy_batch_decodes_as_long_as_it_says() -> None:
    """Nothing but padding: a graph is captured with rows of the length it will replay."""
    dummy = split([], 4, num_reqs=3, num_tokens=6, max_query_len=2)

    assert dummy == BatchSplit(3, 6, 2, True, 0, 0)
