"""Every count that a scheduler, a pool or a builder needs comes from the layout."""

from typing import Any

import pytest
from tests.support.kinds import ALIGN, EVERY_KIND
from tests.support.plans import plan

from bt_width import (
    AttentionSpec,
    BlockTableError,
    CacheSpec,
    InvalidSpecError,
    LayerSpec,
    MambaSpec,
    RingSpec,
    RowOverflowError,
    SlidingWindowSpec,
    UniformSpec,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("spec", "num_tokens", "num_blocks"),
    [
        pytest.param(AttentionSpec(block_size=16), 1, 1, id="one-token"),
        pytest.param(AttentionSpec(block_size=16), 31, 1, id="one-below-a-block-of-two-ranks"),
        pytest.param(AttentionSpec(block_size=16), 32, 1, id="a-block-of-two-ranks"),
        pytest.param(AttentionSpec(block_size=16), 33, 2, id="one-past-it"),
        pytest.param(AttentionSpec(block_size=16, sharded=False), 33, 3, id="replicated"),
        pytest.param(SlidingWindowSpec(block_size=16, window=8), 33, 3, id="window-keeps-columns"),
        pytest.param(MambaSpec(block_size=16), 33, 1, id="mamba-none"),
        pytest.param(MambaSpec(block_size=16, num_speculative_blocks=2), 1, 3, id="mamba-none-2"),
        pytest.param(MambaSpec(block_size=16, mode="align"), 33, 3, id="mamba-align"),
        pytest.param(ALIGN, 64, 3, id="mamba-align-2-at-a-block"),
        pytest.param(ALIGN, 65, 4, id="mamba-align-2-past-it"),
        pytest.param(RingSpec(block_size=4), 33, 1, id="ring"),
    ],
)
def test_blocks_of_a_request(spec: CacheSpec, num_tokens: int, num_blocks: int) -> None:
    assert plan(spec, 1000, size=2).num_blocks(num_tokens) == num_blocks


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_no_token_holds_no_block(spec: CacheSpec) -> None:
    """A request that has not started holds nothing, not even its speculative blocks."""
    assert plan(spec, 1000).num_blocks(0) == 0


@pytest.mark.parametrize("spec", EVERY_KIND)
@pytest.mark.parametrize("lookahead_tokens", [0, 7])
def test_the_longest_request_holds_the_most_blocks(spec: CacheSpec, lookahead_tokens: int) -> None:
    layout = plan(spec, 1000, lookahead_tokens=lookahead_tokens)

    assert layout.num_blocks(1000 + lookahead_tokens) == layout.max_num_blocks


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a_request_past_the_limit_overflows(spec: CacheSpec) -> None:
    """Even where the last block, or the alignment, would have room for it."""
    layout = plan(spec, 1000, lookahead_tokens=7)

    with pytest.raises(RowOverflowError, match="1008"):
        layout.num_blocks(1008)


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", None], ids=repr)
@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a_number_of_tokens_is_a_count(spec: CacheSpec, bad: Any) -> None:
    layout = plan(spec, 1000)

    with pytest.raises(InvalidSpecError, match="num_tokens"):
        layout.num_blocks(bad)


@pytest.mark.parametrize(
    ("spec", "in_flight", "num_blocks"),
    [
        pytest.param(AttentionSpec(block_size=16), 1, 63, id="attention-whole-row"),
        pytest.param(SlidingWindowSpec(block_size=16, window=64), 1, 5, id="window-at-a-block"),
        pytest.param(SlidingWindowSpec(block_size=16, window=64), 2, 6, id="window-past-a-block"),
        pytest.param(SlidingWindowSpec(block_size=16, window=65), 1, 6, id="window-65"),
        pytest.param(
            SlidingWindowSpec(block_size=16, window=64, extra_retained_tokens=1),
            1,
            6,
            id="one-retained",
        ),
        pytest.param(SlidingWindowSpec(block_size=16, window=1), 1, 2, id="window-of-one"),
        pytest.param(SlidingWindowSpec(block_size=16, window=64), 900, 62, id="window-many"),
        pytest.param(SlidingWindowSpec(block_size=16, window=64), 2000, 63, id="never-above-a-row"),
        pytest.param(MambaSpec(block_size=16), 50, 1, id="mamba-none"),
        pytest.param(MambaSpec(block_size=16, num_speculative_blocks=4), 50, 5, id="mamba-none-4"),
        pytest.param(MambaSpec(block_size=16, mode="align"), 50, 2, id="mamba-align"),
        pytest.param(ALIGN, 50, 4, id="mamba-align-2"),
        pytest.param(RingSpec(block_size=4), 50, 1, id="ring"),
    ],
)
def test_blocks_that_admission_reserves(spec: CacheSpec, in_flight: int, num_blocks: int) -> None:
    assert plan(spec, 1000).max_resident_blocks(in_flight) == num_blocks


@pytest.mark.parametrize(("steps", "num_blocks"), [(1, 4), (2, 5), (3, 6)])
def test_each_further_step_in_flight_keeps_a_state(steps: int, num_blocks: int) -> None:
    """A step under way still reads the state that the step after it moves on from."""
    assert plan(ALIGN, 1000).max_resident_blocks(50, steps_in_flight=steps) == num_blocks


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_further_steps_in_flight_cost_other_groups_nothing(spec: CacheSpec) -> None:
    if isinstance(spec, MambaSpec) and spec.mode == "align":
        pytest.skip("keeps a state more")
    layout = plan(spec, 1000)

    assert layout.max_resident_blocks(50, steps_in_flight=9) == layout.max_resident_blocks(50)


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "1", None], ids=repr)
def test_steps_in_flight_are_a_positive_count(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="steps_in_flight"):
        plan(ALIGN, 1000).max_resident_blocks(50, steps_in_flight=bad)


def test_a_short_row_bounds_what_is_reserved() -> None:
    """One block holds the longest request, so an aligned Mamba group needs no second one."""
    assert plan(MambaSpec(block_size=1024, mode="align"), 1000).max_resident_blocks(50) == 1
    assert plan(SlidingWindowSpec(block_size=1024, window=9), 1000).max_resident_blocks(50) == 1


def test_a_window_never_holds_more_than_was_reserved() -> None:
    """Wherever a window starts inside a block, and the bound is reached by some start."""
    for window in range(1, 12):
        for in_flight in range(1, 9):
            spec = SlidingWindowSpec(block_size=4, window=window, extra_retained_tokens=2)
            layout = plan(spec, 400)
            live = [
                {position // 4 for position in range(start, start + window - 1 + 2 + in_flight)}
                for start in range(100, 104)
            ]
            reserved = layout.max_resident_blocks(in_flight)

            assert max(map(len, live)) <= reserved <= max(map(len, live)) + 1


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", None], ids=repr)
@pytest.mark.parametrize("spec", EVERY_KIND)
def test_tokens_in_flight_are_a_count(spec: CacheSpec, bad: Any) -> None:
    layout = plan(spec, 1000)

    with pytest.raises(InvalidSpecError, match="max_in_flight_tokens"):
        layout.max_resident_blocks(bad)


@pytest.mark.parametrize(
    ("num_tokens", "column"), [(0, 0), (1, 0), (640, 0), (641, 1), (1280, 1), (1281, 2)]
)
def test_state_columns_at_the_boundaries(num_tokens: int, column: int) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/53398
    and https://github.com/vllm-project/vllm/issues/55600
    and https://github.com/vllm-project/vllm/issues/53142
    and https://github.com/wtdcode/vllm-backport/pull/77
    """
    assert plan(MambaSpec(block_size=640, mode="align"), 5120).state_column(num_tokens) == column


@pytest.mark.parametrize(
    ("block_size", "max_model_len", "width", "num_computed", "column"),
    [
        pytest.param(640, 5120, 8, 3360, 5, id="block-of-640"),
        pytest.param(2176, 262144, 121, 100096, 45, id="block-of-2176"),
        pytest.param(1152, 262144, 228, 11520, 9, id="block-of-1152"),
    ],
)
def test_a_state_column_is_counted_in_the_groups_own_blocks(
    block_size: int, max_model_len: int, width: int, num_computed: int, column: int
) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/53398
    and https://github.com/vllm-project/vllm/issues/55600
    and https://github.com/vllm-project/vllm/issues/53142
    and https://github.com/wtdcode/vllm-backport/pull/77
    """
    layout = plan(MambaSpec(block_size=block_size, mode="align"), max_model_len)

    assert layout.width == width
    assert layout.state_column(num_computed) == column


def test_a_state_column_past_the_width_overflows() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/53398
    and https://github.com/vllm-project/vllm/issues/55600
    and https://github.com/vllm-project/vllm/issues/53142
    and https://github.com/wtdcode/vllm-backport/pull/77
    """
    layout = plan(MambaSpec(block_size=640, mode="align"), 5120)

    assert layout.state_column(8 * 640) == 7
    for num_tokens in (8 * 640 + 1, 9 * 640 + 1, 10**9):
        with pytest.raises(RowOverflowError, match=str((num_tokens - 1) // 640)):
            layout.state_column(num_tokens)


def test_speculative_columns_are_columns() -> None:
    """They are part of the row, so a state column overflows only after them."""
    layout = plan(ALIGN, 640)

    assert layout.width == 12
    assert layout.state_column(12 * 64) == 11
    with pytest.raises(RowOverflowError):
        layout.state_column(12 * 64 + 1)


@pytest.mark.parametrize("num_tokens", [0, 1, 64, 65, 1000])
def test_without_prefix_caching_the_state_stays_in_column_0(num_tokens: int) -> None:
    layout = plan(MambaSpec(block_size=64, num_speculative_blocks=2), 1000)

    assert layout.state_column(num_tokens) == 0


def test_a_uniform_group_has_its_members_state_columns() -> None:
    layout = plan(UniformSpec(members={"a": ALIGN, "b": ALIGN}), 1000)

    assert layout.state_column(65) == 1


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", None], ids=repr)
@pytest.mark.parametrize("mode", ["none", "align"])
def test_a_state_column_is_of_a_count(mode: Any, bad: Any) -> None:
    layout = plan(MambaSpec(block_size=64, mode=mode), 1000)

    with pytest.raises(InvalidSpecError, match="num_tokens"):
        layout.state_column(bad)


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(block_size=16),
        SlidingWindowSpec(block_size=16, window=8),
        RingSpec(block_size=4),
    ],
    ids=["attention", "window", "ring"],
)
def test_only_a_recurrent_group_has_a_state_column(spec: LayerSpec) -> None:
    layout = plan(spec, 1000)

    with pytest.raises(BlockTableError):
        layout.state_column(10)
