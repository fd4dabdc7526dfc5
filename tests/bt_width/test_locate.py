"""Where a token lies, and how many tokens of a request a rank keeps."""

from typing import Any

import pytest
from tests.support.kinds import REPLICATED, SLOTLESS
from tests.support.plans import plan, plan_ranks

from bt_width import (
    AttentionSpec,
    CacheSpec,
    InvalidSpecError,
    LayerSpec,
    Location,
    RingSpec,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("block_size", "kernel_block_size", "position", "column", "offset"),
    [
        pytest.param(256, 256, 300, 1, 44, id="second-block"),
        pytest.param(784, 16, 783, 48, 15, id="last-of-a-block"),
        pytest.param(784, 16, 784, 49, 0, id="first-of-the-next"),
        pytest.param(256, 256, 4095, 15, 255, id="last-of-the-row"),
        pytest.param(256, 256, 4096, 16, 0, id="first-past-the-row"),
        pytest.param(1, 1, 300, 300, 0, id="block-of-one"),
    ],
)
def test_a_position_lies_in_a_column_at_an_offset(
    block_size: int, kernel_block_size: int, position: int, column: int, offset: int
) -> None:
    layout = plan(AttentionSpec(block_size=block_size), 4096, kernel_block_size=kernel_block_size)

    assert layout.locate(position) == Location(rank=0, column=column, offset=offset)


@pytest.mark.parametrize(
    ("position", "rank", "column", "offset"),
    [
        pytest.param(0, 0, 0, 0, id="first"),
        pytest.param(200, 1, 1, 8, id="second-rank"),
        pytest.param(600, 0, 3, 24, id="first-rank-again"),
        pytest.param(511, 3, 1, 63, id="last-of-the-first-column"),
    ],
)
def test_ownership_is_counted_in_blocks(position: int, rank: int, column: int, offset: int) -> None:
    """Every rank knows where every position lies, its own or not.

    Reported as https://github.com/vllm-project/vllm/pull/51031
    """
    layouts = plan_ranks(
        AttentionSpec(block_size=128), 1024, 4, interleave=128, kernel_block_size=64
    )

    for layout in layouts:
        assert layout.locate(position) == Location(rank=rank, column=column, offset=offset)


@pytest.mark.parametrize("spec", REPLICATED)
def test_a_replicated_position_lies_on_the_rank_that_asks(spec: CacheSpec) -> None:
    for rank, layout in enumerate(plan_ranks(spec, 1000, 3)):
        assert layout.locate(37).rank == rank


@pytest.mark.parametrize("position", [0, 3, 4, 1388, 499_999])
def test_a_ring_has_one_column(position: int) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/57317
    and https://github.com/vllm-project/vllm/pull/53906
    """
    assert plan(RingSpec(block_size=4), 500_000).locate(position) == Location(
        rank=0, column=0, offset=position % 4
    )


def test_past_the_row_a_position_has_the_column_that_it_would_have() -> None:
    layout = plan(AttentionSpec(block_size=4, token_alignment=None), 128)

    assert layout.width == 32
    assert layout.locate(130).column == 32
    assert layout.locate(2**31).column == 2**29


@pytest.mark.parametrize("spec", SLOTLESS)
def test_a_group_without_slots_locates_nothing(spec: CacheSpec) -> None:
    with pytest.raises(InvalidSpecError, match="slot"):
        plan(spec, 1000).locate(0)


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", None], ids=repr)
@pytest.mark.parametrize(
    "spec", [AttentionSpec(block_size=16), RingSpec(block_size=4)], ids=["attention", "ring"]
)
def test_only_a_count_is_located(spec: LayerSpec, bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="position"):
        plan(spec, 1000).locate(bad)


@pytest.mark.parametrize(
    ("interleave", "seq_len", "lengths"),
    [
        pytest.param(1, 0, [0, 0, 0], id="none"),
        pytest.param(1, 1, [1, 0, 0], id="one"),
        pytest.param(1, 3, [1, 1, 1], id="a-round"),
        pytest.param(1, 4, [2, 1, 1], id="one-past-a-round"),
        pytest.param(4, 3, [3, 0, 0], id="inside-a-run"),
        pytest.param(4, 4, [4, 0, 0], id="a-run"),
        pytest.param(4, 11, [4, 4, 3], id="inside-the-last-run"),
        pytest.param(4, 13, [5, 4, 4], id="one-past-a-round-of-runs"),
        pytest.param(4, 1000, [336, 332, 332], id="long"),
    ],
)
def test_local_lengths(interleave: int, seq_len: int, lengths: list[int]) -> None:
    layouts = plan_ranks(AttentionSpec(block_size=4), 1000, 3, interleave=interleave)

    assert [layout.local_length(seq_len) for layout in layouts] == lengths
    assert [layouts[0].local_length(seq_len, rank) for rank in range(3)] == lengths


@pytest.mark.parametrize("spec", REPLICATED[:2])
def test_a_replicated_group_holds_every_token(spec: CacheSpec) -> None:
    for rank, layout in enumerate(plan_ranks(spec, 1000, 3)):
        assert layout.local_length(777) == 777
        assert layout.local_length(777, rank) == 777


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", None], ids=repr)
def test_a_length_is_a_count(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="seq_len"):
        plan(AttentionSpec(block_size=16), 1000, size=2).local_length(bad)


@pytest.mark.parametrize("bad", [-1, 2, 7, True, 1.0, "1"], ids=repr)
def test_a_local_length_is_of_a_rank_there_is(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="rank"):
        plan(AttentionSpec(block_size=16), 1000, size=2).local_length(10, bad)


class ForeignInt:
    """An integer of NumPy or torch: no ``int``, but good for an index."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_run_time_numbers_may_be_another_librarys() -> None:
    layout = plan(AttentionSpec(block_size=16), 1000, size=2)

    assert layout.locate(ForeignInt(33)) == layout.locate(33)
    assert layout.slot(ForeignInt(0), [5]) == 80
    assert layout.local_length(ForeignInt(33), ForeignInt(1)) == 16
    assert layout.num_blocks(ForeignInt(33)) == 2
    assert layout.max_resident_blocks(ForeignInt(33)) == 32
    with pytest.raises(InvalidSpecError):
        layout.num_blocks(ForeignInt(-1))
