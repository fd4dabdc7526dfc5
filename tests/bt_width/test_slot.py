"""One token's place in cache memory: a slot, or none, but never a neighbour's."""

from typing import Any

import pytest
from tests.support.kinds import REPLICATED, SLOTLESS
from tests.support.plans import plan, plan_ranks, slots

from bt_width import (
    NULL_BLOCK,
    PAD_SLOT,
    AttentionSpec,
    CacheSpec,
    InvalidEditError,
    InvalidSpecError,
    LayerSpec,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    UniformSpec,
)

pytestmark = pytest.mark.fast


def test_the_sentinels() -> None:
    """Tables pad with 0, slot mappings with -1; both reach consumers as plain numbers."""
    assert (NULL_BLOCK, PAD_SLOT) == (0, -1)


def test_a_block_size_that_is_no_power_of_two() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/31380
    and https://github.com/vllm-project/vllm/pull/35923
    and https://github.com/InternLM/lmdeploy/issues/3781
    """
    layout = plan(AttentionSpec(block_size=48), 96)

    assert slots(layout, [47, 48], [5, 9]) == [287, 432]


def test_slots_of_a_split_and_sharded_group() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/51031"""
    layouts = plan_ranks(
        AttentionSpec(block_size=128), 1024, 4, interleave=128, kernel_block_size=64
    )

    found = [slots(layout, [200, 600], [7, 3]) for layout in layouts]

    assert found == [[PAD_SLOT, 472], [968, PAD_SLOT], [PAD_SLOT] * 2, [PAD_SLOT] * 2]


def test_each_rank_owns_a_quarter() -> None:
    """Ownership in kernel blocks gave half to each of two ranks and nothing to the others.

    Reported as https://github.com/vllm-project/vllm/pull/51031
    """
    layouts = plan_ranks(
        AttentionSpec(block_size=128), 1024, 4, interleave=128, kernel_block_size=64
    )

    owned = [
        sum(slot != PAD_SLOT for slot in slots(layout, range(1024), [7, 3])) for layout in layouts
    ]

    assert owned == [256, 256, 256, 256]


def test_runs_of_two_positions() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/26696"""
    layouts = plan_ranks(AttentionSpec(block_size=4), 16, 2, interleave=2)

    found = [slots(layout, range(16), [6, 9]) for layout in layouts]

    assert found == [
        [24, 25, -1, -1, 26, 27, -1, -1, 36, 37, -1, -1, 38, 39, -1, -1],
        [-1, -1, 24, 25, -1, -1, 26, 27, -1, -1, 36, 37, -1, -1, 38, 39],
    ]


def test_runs_of_one_position() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/26696"""
    layouts = plan_ranks(AttentionSpec(block_size=4), 16, 2, interleave=1)

    assert slots(layouts[1], range(8), [6, 9]) == [-1, 24, -1, 25, -1, 26, -1, 27]


@pytest.mark.parametrize("spec", REPLICATED)
def test_every_rank_of_a_replicated_group_has_every_token(spec: CacheSpec) -> None:
    """Reported as https://github.com/vllm-project/vllm-ascend/issues/14320
    and https://github.com/vllm-project/vllm-ascend/pull/14402
    and https://github.com/vllm-project/vllm-ascend/pull/16327
    """
    block_ids = list(range(1, 1 + plan(spec, 1000).num_blocks(1000)))

    found = [slots(layout, range(1000), block_ids) for layout in plan_ranks(spec, 1000, 8)]

    assert all(rank_slots == found[0] for rank_slots in found)
    assert min(found[0]) >= 0


def test_a_token_of_a_sharded_group_has_one_owner() -> None:
    """Reported as https://github.com/vllm-project/vllm-ascend/issues/14320
    and https://github.com/vllm-project/vllm-ascend/pull/14402
    and https://github.com/vllm-project/vllm-ascend/pull/16327
    """
    layouts = plan_ranks(AttentionSpec(block_size=16), 1000, 8)

    found = [slots(layout, range(1000), range(1, 9)) for layout in layouts]

    assert all(sum(slot >= 0 for slot in owners) == 1 for owners in zip(*found, strict=True))


def test_a_position_past_the_row_has_no_slot() -> None:
    """Neither the neighbour's block, 144, nor block 0.

    Reported as https://github.com/vllm-project/vllm/issues/53982
    and https://github.com/vllm-project/vllm/pull/54296
    """
    layout = plan(AttentionSpec(block_size=16, token_alignment=None), 16)

    assert layout.width == 1
    assert slots(layout, [0, 16], [5]) == [80, PAD_SLOT]


def test_far_past_the_row() -> None:
    """A row of 32 columns whose first alone is in use.

    Reported as https://github.com/vllm-project/vllm/issues/53982
    and https://github.com/vllm-project/vllm/pull/54296
    """
    layout = plan(AttentionSpec(block_size=4), 4)

    assert layout.width == 32
    assert slots(layout, [0, 3, 4, 130, 8192, 1048575], [7]) == [28, 31, -1, -1, -1, -1]


def test_past_the_width_ids_do_not_help() -> None:
    """A longer list than the row holds is not read past the row.

    Reported as https://github.com/vllm-project/vllm/issues/53982
    and https://github.com/vllm-project/vllm/pull/54296
    """
    layout = plan(AttentionSpec(block_size=4, token_alignment=None), 8)

    assert layout.slot(8, [1, 2, 3]) == PAD_SLOT


def test_a_ring_stays_in_its_block() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/57317
    and https://github.com/vllm-project/vllm/pull/53906
    """
    layout = plan(RingSpec(block_size=4), 500_000)

    assert slots(layout, range(1388, 1392), [13]) == [52, 53, 54, 55]
    assert {layout.slot(position, [13]) for position in range(0, 500_000, 997)} == {52, 53, 54, 55}


def test_the_longest_row_has_a_last_slot() -> None:
    layout = plan(AttentionSpec(block_size=16), 100)

    assert layout.slot(127, list(range(1, 9))) == 8 * 16 + 15
    assert layout.slot(128, list(range(1, 9))) == PAD_SLOT


def test_a_position_past_the_ids_given_has_no_slot() -> None:
    layout = plan(AttentionSpec(block_size=16), 100)

    assert layout.slot(15, [5]) == 95
    assert layout.slot(16, [5]) == PAD_SLOT
    assert layout.slot(0, []) == PAD_SLOT


def test_a_ring_without_its_block_has_no_slot() -> None:
    layout = plan(RingSpec(block_size=4), 100)

    assert layout.slot(9, []) == PAD_SLOT
    assert layout.slot(9, [NULL_BLOCK]) == PAD_SLOT


def test_a_position_in_a_nulled_column_has_no_slot() -> None:
    """What a window has left behind is never written again.

    Reported as https://github.com/vllm-project/vllm/issues/42273
    and https://github.com/vllm-project/vllm/pull/42276
    and https://github.com/NVIDIA/TensorRT-LLM/pull/6768
    """
    layout = plan(SlidingWindowSpec(block_size=32, window=128), 256)

    found = slots(layout, [0, 127, 128, 255], [0, 0, 0, 0, 5, 6, 7, 8])

    assert found == [PAD_SLOT, PAD_SLOT, 160, 287]


def test_every_kernel_block_of_a_null_block_is_null() -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/42273
    and https://github.com/vllm-project/vllm/pull/42276
    and https://github.com/NVIDIA/TensorRT-LLM/pull/6768
    """
    layout = plan(SlidingWindowSpec(block_size=32, window=128), 256, kernel_block_size=16)

    assert slots(layout, [0, 16, 31, 32], [0, 5]) == [PAD_SLOT, PAD_SLOT, PAD_SLOT, 160]


@pytest.mark.parametrize("position", [-1, -16, -(2**31), -(2**63)])
@pytest.mark.parametrize(
    "spec", [AttentionSpec(block_size=16), RingSpec(block_size=4)], ids=["attention", "ring"]
)
def test_a_negative_position_has_no_slot(spec: LayerSpec, position: int) -> None:
    """A negative index would have found the last column."""
    assert plan(spec, 16).slot(position, [5]) == PAD_SLOT


@pytest.mark.parametrize("position", [2**31, 2**31 + 1, 2**32, 2**63])
@pytest.mark.parametrize(
    "spec", [AttentionSpec(block_size=16), RingSpec(block_size=4)], ids=["attention", "ring"]
)
def test_a_position_that_leaves_int32_has_no_slot(spec: LayerSpec, position: int) -> None:
    assert plan(spec, 16).slot(position, [5]) == PAD_SLOT


def test_a_ring_turns_until_int32_ends() -> None:
    assert plan(RingSpec(block_size=4), 16).slot(2**31 - 1, [5]) == 23


def test_a_slot_is_not_bounded_by_int32() -> None:
    """Ids near the top of a large pool, where a product in 32 bits wraps."""
    layout = plan(AttentionSpec(block_size=256), 256)

    assert layout.slot(255, [2_147_480_000]) == 2_147_480_000 * 256 + 255


@pytest.mark.parametrize("bad", [True, 1.0, "1", None], ids=repr)
@pytest.mark.parametrize("spec", [AttentionSpec(block_size=16), MambaSpec(block_size=16)], ids=repr)
def test_what_is_no_number_is_no_position(spec: LayerSpec, bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="position"):
        plan(spec, 1000).slot(bad, [5])


@pytest.mark.parametrize("bad", [None, 5, ["5"], [5.0], [True], [None]], ids=repr)
def test_kernel_block_ids_are_a_sequence_of_ints(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match=r"kernel.block.id"):
        plan(AttentionSpec(block_size=16), 1000).slot(0, bad)


def test_a_negative_id_is_no_block() -> None:
    """Anywhere but in the position's own column it is not looked at."""
    layout = plan(AttentionSpec(block_size=16), 1000)

    assert layout.slot(0, [5, -1]) == 80
    with pytest.raises(InvalidEditError, match="-1") as caught:
        layout.slot(16, [5, -1])
    assert caught.value.details["column"] == 1


@pytest.mark.parametrize("spec", SLOTLESS)
def test_a_group_without_slots_has_no_slot(spec: CacheSpec) -> None:
    layout = plan(spec, 1000)

    assert [layout.slot(position, [5]) for position in (0, 15, 16, -1)] == [PAD_SLOT] * 4


def test_a_state_slot_follows_from_a_token_slot() -> None:
    """Slots count tokens; four tokens share the state at a quarter of their slots."""
    spec = UniformSpec(
        members={
            "compressed": AttentionSpec(block_size=16, tokens_per_state=4),
            "plain": AttentionSpec(block_size=16),
        }
    )
    layout = plan(spec, 64)

    token_slots = slots(layout, range(16, 24), [5, 9])

    assert token_slots == list(range(144, 152))
    assert [slot // layout.tokens_per_state("compressed") for slot in token_slots] == [36] * 4 + [
        37
    ] * 4
