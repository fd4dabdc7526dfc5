"""A ring's slots go round and round in the request's own block."""

import pytest
from tests.support.batches import Request, make_batch
from tests.support.plain_builders import int32
from tests.support.plans import serving_limits

from bt_builders import RingTailMetadataBuilder
from bt_width import AttentionSpec, BlockTableLayout, InvalidSpecError, RingSpec

pytestmark = pytest.mark.fast


def plan_ring(max_model_len: int = 1_000_000, *, size: int = 1, rank: int = 0) -> BlockTableLayout:
    limits = serving_limits(
        max_model_len, max_num_batched_tokens=256, size=size, rank=rank, num_speculative_tokens=3
    )
    return BlockTableLayout.plan(RingSpec(block_size=4), limits)


def test_slots_of_a_ring_stay_in_its_own_block() -> None:
    """Block 13, positions 1388..1391: 52, 53, 54, 55. A generic kernel left them unwritten.

    Reported as https://github.com/vllm-project/vllm/pull/57317
    and https://github.com/vllm-project/vllm/pull/53906
    """
    layout = plan_ring()
    common = make_batch(layout, [Request(1392, 4, (13,))])

    metadata = RingTailMetadataBuilder(layout, "cpu").build(common)

    assert metadata.slot_mapping.tolist() == [52, 53, 54, 55]


def test_a_long_prompt_never_leaves_the_ring() -> None:
    """500,000 tokens: a column of a growing row would be 125,000 columns past the ring's one.

    Reported as https://github.com/vllm-project/vllm/pull/57317
    and https://github.com/vllm-project/vllm/pull/53906
    """
    layout = plan_ring()
    common = make_batch(layout, [Request(500_000, 200, (7,), is_prefilling=True)])

    metadata = RingTailMetadataBuilder(layout, "cpu").build(common)

    assert set(metadata.slot_mapping.tolist()) == {28, 29, 30, 31}
    assert metadata.num_live.tolist() == [4]


def test_live_slots_are_the_rings_at_most() -> None:
    layout = plan_ring()
    common = make_batch(layout, [Request(3, 1), Request(4, 1), Request(9, 1)], num_reqs=4)

    assert RingTailMetadataBuilder(layout, "cpu").build(common).num_live.tolist() == [3, 4, 4, 0]


@pytest.mark.parametrize("rank", range(2))
def test_a_ring_is_replicated(rank: int) -> None:
    """Every rank of a sharded server writes every token of a ring."""
    layout = plan_ring(size=2, rank=rank)
    common = make_batch(layout, [Request(6, 4, (5,))])

    assert RingTailMetadataBuilder(layout, "cpu").build(common).slot_mapping.tolist() == [
        22, 23, 20, 21,
    ]  # fmt: skip


def test_draft_slots_go_on_round_the_ring() -> None:
    layout = plan_ring()
    builder = RingTailMetadataBuilder(layout, "cpu")
    common = make_batch(layout, [Request(6, 1, (5,)), Request(4, 1, (9,))])

    steps = [builder.start_drafts(common.block_table, int32([6, 4])).slot_mapping.tolist()]
    for _ in range(3):
        steps.append(builder.advance_drafts(common.block_table).slot_mapping.tolist())

    assert steps == [[21, 39], [22, 36], [23, 37], [20, 38]]


def test_only_a_ring_group_has_a_tail() -> None:
    layout = BlockTableLayout.plan(AttentionSpec(block_size=16), serving_limits(64))

    with pytest.raises(InvalidSpecError, match="RingSpec"):
        RingTailMetadataBuilder(layout, "cpu")
