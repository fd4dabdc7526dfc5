"""Numbers a planner needs: bytes, reach, and what a pool can hold."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.kinds import EVERY_KIND
from tests.support.plans import plan, serving_limits

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    InvalidSpecError,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    addressable_tokens,
    index_buffer_bytes,
    longest_request,
    max_addressable_blocks,
    row_bytes,
    table_bytes,
    tables_bytes,
)

pytestmark = pytest.mark.fast


# bytes


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a_column_is_four_bytes(spec: CacheSpec) -> None:
    layout = BlockTableLayout.plan(spec, serving_limits(1000, max_num_reqs=7))

    assert row_bytes(layout) == 4 * layout.width
    assert table_bytes(layout) == 7 * 4 * layout.width


def test_a_split_widens_a_row() -> None:
    assert row_bytes(plan(AttentionSpec(block_size=64), 1000, kernel_block_size=16)) == 4 * 64


def test_tables_of_all_groups() -> None:
    layouts = [plan(AttentionSpec(block_size=64), 1000), plan(RingSpec(block_size=4), 1000)]

    assert tables_bytes(layouts) == 4 * 4 * 16 + 4 * 4 * 1
    assert tables_bytes(layouts[:1]) == table_bytes(layouts[0])
    assert tables_bytes([]) == 0


# index buffers


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "num_speculative_tokens", "rows"),
    [
        pytest.param(64, 0, 4, id="requests-decide"),
        pytest.param(64, 3, 16, id="each-request-brings-its-drafts"),
        pytest.param(16, 3, 16, id="both"),
        pytest.param(15, 3, 15, id="tokens-decide"),
        pytest.param(3, 0, 3, id="fewer-tokens-than-requests"),
    ],
)
def test_an_index_buffer_has_a_row_per_decode_token(
    max_num_batched_tokens: int, num_speculative_tokens: int, rows: int
) -> None:
    limits = serving_limits(
        1000,
        max_num_reqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=num_speculative_tokens,
    )
    layout = BlockTableLayout.plan(AttentionSpec(block_size=64), limits, 16)

    assert index_buffer_bytes(layout) == rows * 64 * 4


def test_an_index_buffer_of_a_gigabyte() -> None:
    """A flattened buffer of 16384 tokens and 16384 columns, as the report counts it.

    Reported as https://github.com/vllm-project/vllm/pull/46514
    """
    limits = serving_limits(1048576, max_num_reqs=16384, max_num_batched_tokens=16384)

    assert index_buffer_bytes(BlockTableLayout.plan(AttentionSpec(block_size=64), limits)) == 2**30


# reach


@pytest.mark.parametrize(
    ("spec", "kernel_block_size", "size", "tokens"),
    [
        pytest.param(AttentionSpec(block_size=64), 64, 1, 1024, id="attention"),
        pytest.param(AttentionSpec(block_size=64), 16, 1, 1024, id="split"),
        pytest.param(AttentionSpec(block_size=64), 16, 3, 1152, id="sharded"),
        pytest.param(AttentionSpec(block_size=64, sharded=False), 64, 3, 1024, id="replicated"),
        pytest.param(SlidingWindowSpec(block_size=64, window=128), 64, 3, 1024, id="window"),
        pytest.param(RingSpec(block_size=4), 4, 3, 2**31, id="ring"),
        pytest.param(MambaSpec(block_size=64, mode="align"), 64, 3, None, id="mamba-align"),
        pytest.param(MambaSpec(block_size=64), 64, 3, None, id="mamba-none"),
    ],
)
def test_tokens_that_a_row_addresses(
    spec: CacheSpec, kernel_block_size: int, size: int, tokens: int | None
) -> None:
    """Alignment included: up to it a position has a column."""
    layout = plan(spec, 1000, kernel_block_size=kernel_block_size, size=size)

    assert addressable_tokens(layout) == tokens


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_last_addressable_token_is_the_last_with_a_column(size: int) -> None:
    layout = plan(AttentionSpec(block_size=48), 1000, kernel_block_size=16, size=size)
    tokens = addressable_tokens(layout)

    assert tokens is not None
    assert layout.locate(tokens - 1).column == layout.width - 1
    assert layout.locate(tokens).column == layout.width


# 32-bit arithmetic in a consumer


def test_the_most_blocks_that_32_bits_address() -> None:
    """Block 16, 8 heads of 128, keys and values: block 65,536 begins at element 2^31.

    Reported as https://github.com/vllm-project/vllm/issues/50427
    """
    assert max_addressable_blocks(16 * 2 * 8 * 128) == 65_536


def test_a_pool_beyond_32_bits() -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/1486"""
    assert max_addressable_blocks(32 * 16 * 16 * 8) < 64_000


@pytest.mark.parametrize("elements_per_block", [1, 3, 1000, 32768, 2**30, 2**31 - 1, 2**31])
def test_the_last_element_of_the_last_block_is_an_int32(elements_per_block: int) -> None:
    blocks = max_addressable_blocks(elements_per_block)

    assert blocks * elements_per_block - 1 <= 2**31 - 1
    assert (blocks + 1) * elements_per_block - 1 > 2**31 - 1


def test_a_block_that_is_too_large_for_32_bits() -> None:
    assert max_addressable_blocks(2**31 + 1) == 0


@pytest.mark.parametrize("bad", [0, -1, True, 16.0, "16", None], ids=repr)
def test_elements_of_a_block_are_a_positive_int(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="elements_per_block"):
        max_addressable_blocks(bad)


# the longest request of a pool


def test_the_null_block_holds_no_request() -> None:
    """Eight blocks of 128 tokens hold 896 tokens: block 0 is no request's.

    Reported as https://github.com/vllm-project/vllm/pull/48724
    and https://github.com/vllm-project/vllm-metal/pull/513
    """
    assert longest_request(plan(AttentionSpec(block_size=128), 4096), 8) == 896


@pytest.mark.parametrize(
    ("num_blocks", "tokens"),
    [
        pytest.param(1202, 19216, id="1201-blocks-of-16"),
        pytest.param(1499, 23968, id="1498-blocks-of-16"),
    ],
)
def test_other_pools_of_the_report(num_blocks: int, tokens: int) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/48724
    and https://github.com/vllm-project/vllm-metal/pull/513
    """
    assert longest_request(plan(AttentionSpec(block_size=16), 32768), num_blocks) == tokens


def test_a_sharded_pool_holds_its_rank_times_as_much() -> None:
    assert longest_request(plan(AttentionSpec(block_size=128), 4096, size=4), 8) == 7 * 512


def test_a_pool_larger_than_a_row_holds_the_longest_request() -> None:
    """The length limit, not what the aligned row could address."""
    assert longest_request(plan(AttentionSpec(block_size=128), 1000), 10_000) == 1000


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a_pool_of_the_null_block_alone_holds_nothing(spec: CacheSpec) -> None:
    assert longest_request(plan(spec, 1000), 1) == 0


@pytest.mark.parametrize("in_flight", [1, 20, 300])
@pytest.mark.parametrize("lookahead_tokens", [0, 7])
@pytest.mark.parametrize("spec", EVERY_KIND)
def test_one_token_more_would_not_fit(
    spec: CacheSpec, lookahead_tokens: int, in_flight: int
) -> None:
    """Against a walk over every length: the longest whose blocks, look-ahead too, the pool has."""
    layout = plan(spec, 200, lookahead_tokens=lookahead_tokens)
    reserved = layout.max_resident_blocks(in_flight)
    held = [layout.num_blocks(length + lookahead_tokens) for length in range(201)]
    for num_blocks in range(2, layout.max_num_blocks + 4):
        fitting = [
            length
            for length, blocks in enumerate(held)
            if length == 0 or min(blocks, reserved) < num_blocks
        ]

        assert longest_request(layout, num_blocks, max_in_flight_tokens=in_flight) == max(fitting)


def test_a_step_is_in_flight_unless_said_otherwise() -> None:
    """A window of 64 and a step of 64 tokens keep nine blocks at once."""
    layout = plan(SlidingWindowSpec(block_size=16, window=64), 1000)

    assert layout.limits.max_num_batched_tokens == 64
    assert longest_request(layout, 10) == 1000
    assert longest_request(layout, 9) == 128
    assert longest_request(layout, 9, max_in_flight_tokens=48) == 1000


@pytest.mark.parametrize("bad", [-1, True, 16.0, "16", None], ids=repr)
def test_a_pool_is_a_count(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="num_blocks"):
        longest_request(plan(AttentionSpec(block_size=16), 1000), bad)


@pytest.mark.parametrize("bad", [-1, True, 16.0, "16"], ids=repr)
def test_tokens_in_flight_are_a_count(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="max_in_flight_tokens"):
        longest_request(plan(RingSpec(block_size=16), 1000), 8, max_in_flight_tokens=bad)


NO_LAYOUTS = [None, 5, "layout", AttentionSpec(block_size=16)]


@pytest.mark.parametrize("bad", NO_LAYOUTS, ids=repr)
@pytest.mark.parametrize("number", [row_bytes, table_bytes, index_buffer_bytes, addressable_tokens])
def test_only_a_layout_has_numbers(number: Callable[[Any], object], bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="layout"):
        number(bad)


@pytest.mark.parametrize("bad", [*NO_LAYOUTS, [None]], ids=repr)
def test_only_layouts_have_bytes_together(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="layout"):
        tables_bytes(bad)


@pytest.mark.parametrize("bad", NO_LAYOUTS, ids=repr)
def test_only_a_layout_has_a_longest_request(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="layout"):
        longest_request(bad, 8)
