"""How a width came about, in words and numbers."""

from collections.abc import Callable

import pytest
from tests.support.kinds import ALIGN, EVERY_KIND
from tests.support.plans import plan

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    MambaSpec,
    RingSpec,
    RowOverflowError,
    SlidingWindowSpec,
    UniformSpec,
)

pytestmark = pytest.mark.fast


def test_the_width_that_crashed_is_explained() -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/46074"""
    explanation = plan(AttentionSpec(block_size=64), 350000).explain()

    assert (
        "max_model_len 350000 / (block 64 x 1 shard) = 5469 blocks, rounded up to 5470 so that "
        "a row spans a multiple of 128 tokens, x 1 kernel block = 5470 columns"
    ) in explanation


def test_a_width_that_fits_by_parity_is_explained_too() -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/46074"""
    assert plan(AttentionSpec(block_size=64), 300000).explain() == (
        "max_model_len 300000 / (block 64 x 1 shard) = 4688 blocks, which span a multiple of 128 "
        "tokens as they are, x 1 kernel block = 4688 columns"
    )


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        pytest.param(
            AttentionSpec(block_size=48, token_alignment=256),
            ["1000", "48", "2 shards", "11", "16", "256", "3 kernel blocks", "48 columns"],
            id="attention",
        ),
        pytest.param(
            SlidingWindowSpec(block_size=48, window=64),
            ["1000", "48", "1 shard", "21", "24", "128", "3 kernel blocks", "72 columns"],
            id="window",
        ),
        pytest.param(
            UniformSpec(members={"a": AttentionSpec(block_size=48)}),
            ["1000", "48", "2 shards", "11", "16", "128", "3 kernel blocks", "48 columns"],
            id="uniform",
        ),
    ],
)
def test_every_number_of_the_derivation_is_there(spec: CacheSpec, numbers: list[str]) -> None:
    explanation = plan(spec, 1000, kernel_block_size=16, size=2).explain()

    assert [number for number in numbers if number not in explanation] == []


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        pytest.param(
            MambaSpec(block_size=64, mode="align", num_speculative_blocks=2),
            ["1000", "64", "2", "18 columns"],
            id="mamba-align",
        ),
        pytest.param(
            MambaSpec(block_size=64, num_speculative_blocks=6), ["6", "7"], id="mamba-none"
        ),
        pytest.param(RingSpec(block_size=4), ["1 block", "1 column"], id="ring"),
    ],
)
def test_groups_that_are_not_aligned_say_their_numbers(spec: CacheSpec, numbers: list[str]) -> None:
    explanation = plan(spec, 1000).explain()

    assert [number for number in numbers if number not in explanation] == []
    assert "128" not in explanation


def test_look_ahead_is_named() -> None:
    explanation = plan(AttentionSpec(block_size=64), 1000, lookahead_tokens=37).explain()

    assert "1000" in explanation
    assert "37" in explanation


def test_without_an_alignment_nothing_is_said_to_be_rounded() -> None:
    layout = plan(AttentionSpec(block_size=64, token_alignment=None), 1000)

    assert "multiple" not in layout.explain()
    assert "16 columns" in layout.explain()


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_an_explanation_is_one_paragraph_that_ends_in_the_width(spec: CacheSpec) -> None:
    for max_model_len in (1, 100, 12345):
        layout = plan(spec, max_model_len)

        assert "\n" not in layout.explain()
        assert f"{layout.width} column" in layout.explain()


@pytest.mark.parametrize(
    "overflow",
    [
        pytest.param(lambda layout: layout.num_blocks(1001), id="tokens"),
        pytest.param(lambda layout: layout.state_column(64 * 19), id="state"),
        pytest.param(lambda layout: layout.expand([1] * 19), id="blocks"),
    ],
)
def test_an_error_about_a_width_carries_its_derivation(
    overflow: Callable[[BlockTableLayout], object],
) -> None:
    layout = plan(ALIGN, 1000)

    with pytest.raises(RowOverflowError) as caught:
        overflow(layout)

    assert layout.width == 18
    assert layout.explain() in str(caught.value)
