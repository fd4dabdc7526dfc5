"""The smallest numbers that are allowed, and the largest that are not."""

import pytest
from tests.support.plans import plan, serving_limits

from bt_width import (
    AttentionSpec,
    InvalidSpecError,
    MultipleOf,
    NoCommonBlockSizeError,
    ServingLimits,
    SlidingWindowSpec,
    longest_request,
    select_kernel_block_size,
)

pytestmark = pytest.mark.fast


def test_a_server_of_one_request_and_one_token_is_a_server() -> None:
    limits = ServingLimits(max_model_len=1, max_num_reqs=1, max_num_batched_tokens=1)

    assert (limits.max_num_reqs, limits.max_num_batched_tokens) == (1, 1)


def test_lookahead_is_added() -> None:
    """3 and 1 share a bit, so that no other way to combine them gives 4."""
    assert serving_limits(3, lookahead_tokens=1).max_tokens == 4


def test_a_pool_has_at_least_the_null_block() -> None:
    layout = plan(AttentionSpec(block_size=16), 100)

    assert longest_request(layout, 1) == 0
    with pytest.raises(InvalidSpecError, match="num_blocks"):
        longest_request(layout, 0)


def test_a_window_of_one_token_blocks_keeps_all_of_a_short_request() -> None:
    layout = plan(SlidingWindowSpec(block_size=1, window=8), 100)

    assert [layout.num_expired_blocks(computed) for computed in (0, 7, 8)] == [0, 0, 1]


def test_sizes_are_compared_by_value() -> None:
    """Python keeps one object per small int only; these two are equal and apart."""
    assert select_kernel_block_size(1024, [[int("512")], [int("512")]]) == 512


def test_the_nearest_block_size_may_be_odd() -> None:
    with pytest.raises(NoCommonBlockSizeError) as refused:
        select_kernel_block_size(4, [[MultipleOf(3)]])

    assert refused.value.details["nearest"] == 3
