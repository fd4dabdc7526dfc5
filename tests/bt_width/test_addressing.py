"""The numbers by which everything above bt_width addresses a row."""

import pickle
import sys
import types

import pytest
from tests.support.kinds import EVERY_KIND
from tests.support.plans import plan, plan_ranks

from bt_width import (
    MAX_POSITION,
    Addressing,
    AttentionSpec,
    CacheSpec,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
)
from bt_width.specs import layers_of

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_addressing_is_computed_once_and_is_plain_ints(spec: CacheSpec) -> None:
    layout = plan(spec, 1000)

    assert layout.addressing is layout.addressing
    assert [type(number) for number in layout.addressing] == [int] * len(Addressing._fields)


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_addressing_says_what_the_layout_says(spec: CacheSpec) -> None:
    for layout in plan_ranks(spec, 1000, 4, interleave=4):
        numbers = layout.addressing

        assert numbers.width == layout.width
        assert numbers.blocks_per_row == layout.blocks_per_row
        assert numbers.max_block_id == layout.max_block_id
        assert numbers.shards == layout.shards
        assert numbers.kernel_blocks_per_block == layout.kernel_blocks_per_block
        assert (numbers.block_size, numbers.kernel_block_size) == (
            layout.block_size,
            layout.kernel_block_size,
        )
        assert (numbers.max_model_len, numbers.max_tokens) == (1000, layout.limits.max_tokens)
        context = layout.limits.context_parallel
        assert numbers.rank == (context.rank if layout.shards > 1 else 0)
        assert numbers.interleave == (context.interleave if layout.shards > 1 else 1)


@pytest.mark.parametrize(
    ("spec", "advances", "slot_blocks", "per_column", "states", "visible"),
    [
        pytest.param(
            AttentionSpec(block_size=16, token_alignment=None),
            *(1, 4, MAX_POSITION, 0, MAX_POSITION),
            id="attention",
        ),
        pytest.param(
            SlidingWindowSpec(
                block_size=16, window=8, extra_retained_tokens=2, token_alignment=None
            ),
            *(1, 4, MAX_POSITION, 0, 9),
            id="window",
        ),
        pytest.param(
            MambaSpec(block_size=16, mode="align", num_speculative_blocks=2),
            *(0, 0, 16, 3, MAX_POSITION),
            id="mamba-align",
        ),
        pytest.param(
            MambaSpec(block_size=16), *(0, 0, MAX_POSITION, 1, MAX_POSITION), id="mamba-none"
        ),
        pytest.param(RingSpec(block_size=16), *(0, 1, MAX_POSITION, 1, MAX_POSITION), id="ring"),
    ],
)
def test_a_rule_that_a_kind_has_not_is_never_reached(
    spec: CacheSpec, advances: int, slot_blocks: int, per_column: int, states: int, visible: int
) -> None:
    numbers = plan(spec, 64).addressing

    assert numbers.advances == advances
    assert numbers.slot_blocks == slot_blocks
    assert numbers.tokens_per_state_column == per_column
    assert numbers.states_per_step == states
    assert numbers.visible_tokens == visible


@pytest.mark.parametrize(
    ("computed", "tokens", "end"),
    [(0, 15, 15), (0, 16, 16), (0, 40, 32), (16, 15, 31), (16, 17, 32), (20, 40, 48), (7, 0, 7)],
)
def test_a_chunk_ends_at_the_last_boundary_in_reach(computed: int, tokens: int, end: int) -> None:
    layout = plan(MambaSpec(block_size=16, mode="align"), 1000)

    assert layout.chunk_end(computed, tokens) == end


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_groups_without_states_at_boundaries_take_the_whole_chunk(spec: CacheSpec) -> None:
    layer = layers_of(spec)[0]
    if isinstance(layer, MambaSpec) and layer.mode == "align":
        pytest.skip("keeps states at boundaries")

    assert plan(spec, 1000).chunk_end(5, 700) == 705
    assert plan(spec, 1000).chunk_end(5, 2**32) == 5 + 2**32


@pytest.mark.parametrize("interleave", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kernel_block_size", [8, 4, 2])
def test_the_arithmetic_deals_out_positions_one_by_one(
    kernel_block_size: int, size: int, interleave: int
) -> None:
    """The oracle hands each run of positions to the next rank, which packs what it gets."""
    layouts = plan_ranks(
        AttentionSpec(block_size=8),
        200,
        size,
        interleave=interleave,
        kernel_block_size=kernel_block_size,
    )
    kept: list[list[int]] = [[] for _ in range(size)]
    for position in range(200):
        kept[position // interleave % size].append(position)
        for layout in layouts:
            numbers = layout.addressing
            rank, column, offset = numbers.locate(position)

            assert kept[rank][column * kernel_block_size + offset] == position
            assert layout.locate(position) == (rank, column, offset)
            assert numbers.local_length(position + 1) == len(kept[numbers.rank])
            for other in range(size):
                assert numbers.local_length(position + 1, other) == len(kept[other])
                assert layout.local_length(position + 1, other) == len(kept[other])


def test_a_ring_comes_round_in_its_one_block() -> None:
    numbers = plan(RingSpec(block_size=6), 100).addressing

    assert [numbers.locate(position) for position in range(14)] == [
        (0, 0, position % 6) for position in range(14)
    ]


def test_a_block_expands_to_its_kernel_blocks_and_null_to_nulls() -> None:
    numbers = plan(AttentionSpec(block_size=12), 100, kernel_block_size=4).addressing

    assert numbers.expand([1, 0, 5]) == [3, 4, 5, 0, 0, 0, 15, 16, 17]


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a_layout_sends_its_causes_alone(spec: CacheSpec) -> None:
    """What was computed is computed again where it arrives, not sent."""
    layout = plan(spec, 1000)
    fresh = len(pickle.dumps(layout))
    assert layout.addressing.width == layout.width
    assert layout.explain()

    received = pickle.loads(pickle.dumps(layout))

    assert len(pickle.dumps(layout)) == fresh
    assert received == layout
    assert received.addressing == layout.addressing


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a_second_look_computes_nothing(spec: CacheSpec) -> None:
    """A hot path reads attributes: no function of this package runs but the properties."""
    layout = plan(spec, 1000)
    names = ("addressing", "width", "blocks_per_row", "max_block_id", "max_num_blocks")
    for name in names:
        getattr(layout, name)
    layout.explain()
    called: list[str] = []

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and "bt_width" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        for name in names:
            getattr(layout, name)
        layout.explain()
    finally:
        sys.setprofile(None)

    assert set(called) <= {"width", "blocks_per_row", "max_block_id", "explain", "cached_property"}
