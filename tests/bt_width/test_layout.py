"""A layout is planned once, and everything about a row is read off it."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.kinds import ALIGN, EVERY_KIND
from tests.support.plans import plan, plan_ranks, serving_limits

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    InvalidSpecError,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    UniformSpec,
    get_block_table_width,
)

pytestmark = pytest.mark.fast


def _through_pickle(layout: BlockTableLayout) -> BlockTableLayout:
    sent: BlockTableLayout = pickle.loads(pickle.dumps(layout))
    return sent


def test_a_plan_keeps_its_causes() -> None:
    spec, limits = AttentionSpec(block_size=64), serving_limits(1000)

    layout = BlockTableLayout.plan(spec, limits, 16)

    assert layout.spec is spec
    assert layout.limits is limits
    assert layout.kernel_block_size == 16
    assert layout.block_size == 64
    assert layout.kernel_blocks_per_block == 4


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_without_a_kernel_block_size_blocks_are_not_split(spec: CacheSpec) -> None:
    layout = plan(spec, 1000)

    assert layout.kernel_block_size == layout.block_size
    assert layout.kernel_blocks_per_block == 1


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a_layout_is_frozen_and_hashable(spec: CacheSpec) -> None:
    layout: Any = plan(spec, 1000)

    assert {layout: "first"}[plan(spec, 1000)] == "first"
    for name in ("spec", "limits", "kernel_block_size"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(layout, name, getattr(layout, name))


def test_layouts_of_different_limits_are_unequal() -> None:
    """A layout planned before the longest request changed is not mistaken for the new one."""
    spec = AttentionSpec(block_size=64)

    assert plan(spec, 1000) != plan(spec, 1001)
    assert plan(spec, 1000) != plan(spec, 1000, kernel_block_size=16)


@pytest.mark.parametrize(
    ("spec", "max_num_blocks", "width", "shards", "slot_mode"),
    [
        pytest.param(AttentionSpec(block_size=16), 13, 16, 4, "block", id="attention"),
        pytest.param(
            AttentionSpec(block_size=16, token_alignment=None), 13, 13, 4, "block", id="unaligned"
        ),
        pytest.param(
            AttentionSpec(block_size=16, sharded=False), 50, 56, 1, "block", id="replicated"
        ),
        pytest.param(SlidingWindowSpec(block_size=16, window=64), 50, 56, 1, "block", id="window"),
        pytest.param(
            SlidingWindowSpec(block_size=16, window=64, token_alignment=48),
            50,
            51,
            1,
            "block",
            id="window-aligned-to-48",
        ),
        pytest.param(MambaSpec(block_size=16), 1, 1, 1, "none", id="mamba-none"),
        pytest.param(
            MambaSpec(block_size=16, num_speculative_blocks=5), 6, 6, 1, "none", id="mamba-none-5"
        ),
        pytest.param(ALIGN, 15, 15, 1, "none", id="mamba-align"),
        pytest.param(RingSpec(block_size=4), 1, 1, 1, "ring", id="ring"),
        pytest.param(
            UniformSpec(members={"a": AttentionSpec(block_size=16)}),
            13,
            16,
            4,
            "block",
            id="uniform-attention",
        ),
        pytest.param(
            UniformSpec(members={"a": SlidingWindowSpec(block_size=16, window=64)}),
            50,
            56,
            1,
            "block",
            id="uniform-window",
        ),
        pytest.param(UniformSpec(members={"a": ALIGN}), 15, 15, 1, "none", id="uniform-mamba"),
        pytest.param(
            UniformSpec(members={"a": RingSpec(block_size=4)}), 1, 1, 1, "ring", id="uniform-ring"
        ),
    ],
)
def test_how_each_kind_counts(
    spec: CacheSpec, max_num_blocks: int, width: int, shards: int, slot_mode: str
) -> None:
    """800 tokens and 4 of look-ahead below the block boundary, over four ranks."""
    layout = plan(spec, 796, lookahead_tokens=4, size=4)

    assert layout.max_num_blocks == max_num_blocks
    assert layout.width == width
    assert layout.shards == shards
    assert layout.tokens_per_block == layout.block_size * shards
    assert layout.slot_mode == slot_mode


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "kernel_block_size", "size", "num_blocks", "width"),
    [
        pytest.param(9416, 32, 32, 1, 295, 296, id="A1-A3-9416"),
        pytest.param(230000, 64, 64, 1, 3594, 3594, id="A2-A3-230000"),
        pytest.param(300000, 64, 64, 1, 4688, 4688, id="A2-A3-300000"),
        pytest.param(325000, 64, 64, 1, 5079, 5080, id="A2-A3-325000"),
        pytest.param(350000, 64, 64, 1, 5469, 5470, id="A2-A3-350000"),
        pytest.param(1048576, 64, 64, 1, 16384, 16384, id="A3-1048576"),
        pytest.param(1048576, 64, 64, 2, 8192, 8192, id="A7-A8-A9-1048576-two-shards"),
        pytest.param(786432, 64, 64, 4, 3072, 3072, id="A9-786432-four-shards"),
        pytest.param(262144, 640, 128, 1, 410, 2050, id="A3-262144-split"),
        pytest.param(32768, 48, 16, 1, 683, 2064, id="A3-block-48"),
        pytest.param(32768, 528, 16, 1, 63, 2112, id="A3-block-528"),
        pytest.param(32768, 784, 16, 1, 42, 2352, id="A3-block-784"),
        pytest.param(512, 16, 16, 2, 16, 16, id="B1-attention"),
        pytest.param(32768, 16, 16, 4, 512, 512, id="E4-four-shards"),
        pytest.param(32768, 16, 16, 2, 1024, 1024, id="E4-two-shards"),
        pytest.param(480000, 64, 64, 4, 1875, 1876, id="480000-four-shards"),
        pytest.param(131072, 48, 16, 1, 2731, 8208, id="131072-block-48"),
        pytest.param(131072, 176, 16, 1, 745, 8272, id="131072-block-176"),
        pytest.param(131072, 528, 16, 1, 249, 8448, id="131072-block-528"),
        pytest.param(262144, 544, 32, 1, 482, 8228, id="262144-block-544"),
        pytest.param(1048576, 4352, 64, 1, 241, 16388, id="1048576-block-4352"),
    ],
)
def test_width_vectors(
    max_model_len: int,
    block_size: int,
    kernel_block_size: int,
    size: int,
    num_blocks: int,
    width: int,
) -> None:
    """Widths of the field, from the length limit on."""
    layout = plan(
        AttentionSpec(block_size=block_size),
        max_model_len,
        kernel_block_size=kernel_block_size,
        size=size,
    )

    assert layout.max_num_blocks == num_blocks
    assert layout.width == width


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a3_the_width_is_the_one_function_of_the_blocks(spec: CacheSpec) -> None:
    for max_model_len in (1, 127, 128, 129, 5000):
        layout = plan(spec, max_model_len, size=2, interleave=4)
        alignment = 128 if layout.slot_mode == "block" else None

        assert layout.width == get_block_table_width(
            layout.max_num_blocks,
            layout.block_size,
            layout.kernel_block_size,
            token_alignment=alignment,
        )


def test_a7_a_uniform_group_is_sharded_as_its_members_are() -> None:
    """The wrapper that forgot the division planned 16384 columns beside its members' 8192."""
    mla, indexer = AttentionSpec(block_size=64), AttentionSpec(block_size=64, tokens_per_state=4)
    wrapper = UniformSpec(members={"mla": mla, "indexer": indexer})

    widths = [plan(spec, 1048576, size=2, interleave=4).width for spec in (wrapper, mla, indexer)]

    assert widths == [8192, 8192, 8192]


def test_a9_every_rank_plans_one_width() -> None:
    for size in (1, 2, 4, 8):
        for max_model_len in (1000, 1001, 786432, 786433, 1048576):
            layouts = plan_ranks(AttentionSpec(block_size=64), max_model_len, size)

            assert len({layout.width for layout in layouts}) == 1


def test_a18_look_ahead_is_part_of_the_longest_request() -> None:
    """A verify step near the wall writes two tokens past the model's length."""
    spec = AttentionSpec(block_size=1, token_alignment=None)

    assert plan(spec, 202752).width == 202752
    assert plan(spec, 202752, lookahead_tokens=2).width == 202754
    assert plan(spec, 202752, lookahead_tokens=2).num_blocks(202754) == 202754


def test_a21_the_length_is_the_one_given() -> None:
    layout = plan(AttentionSpec(block_size=16, token_alignment=None), 1500)

    assert layout.width == 94


def test_b1_a_recurrent_group_is_not_divided() -> None:
    """A request of 257 tokens has 17 Mamba blocks beside at most 16 attention blocks."""
    mamba = plan(MambaSpec(block_size=16, mode="align"), 512, size=2)

    assert mamba.width == 32
    assert mamba.num_blocks(257) == 17
    assert plan(AttentionSpec(block_size=16), 512, size=2).width == 16


@pytest.mark.parametrize("size", [2, 4])
def test_b3_a_recurrent_width_is_the_same_at_every_size(size: int) -> None:
    assert plan(MambaSpec(block_size=16, mode="align"), 512, size=size).width == 32


def test_b7_each_group_counts_in_its_own_blocks() -> None:
    """No global block size: 4, the smallest of four, is not what 256 is divided by."""
    widths = [
        plan(AttentionSpec(block_size=block_size, token_alignment=None), 4096).width
        for block_size in (256, 64, 8, 4)
    ]

    assert widths == [16, 64, 512, 1024]


def test_e4_the_number_of_shards_is_only_ever_said() -> None:
    """Nothing of the process decides it: one plan, with and without, gives both of the field's."""
    spec = AttentionSpec(block_size=16)

    assert [plan(spec, 32768, size=size).width for size in (1, 2, 4)] == [2048, 1024, 512]


def test_the_alignment_declared_is_the_alignment_planned() -> None:
    for alignment, width in ((None, 13), (1, 13), (32, 14), (48, 15), (256, 16), (512, 32)):
        spec = AttentionSpec(block_size=16, token_alignment=alignment)

        assert plan(spec, 13 * 16).width == width


@pytest.mark.parametrize(
    "spec",
    [MambaSpec(block_size=64), RingSpec(block_size=4), SlidingWindowSpec(block_size=16, window=8)],
    ids=["mamba", "ring", "window"],
)
def test_a_kind_that_does_not_compress_has_one_token_a_state(spec: CacheSpec) -> None:
    assert plan(spec, 1000).tokens_per_state() == 1


def test_tokens_per_state_of_a_member() -> None:
    spec = UniformSpec(
        members={
            "indexer": AttentionSpec(block_size=64, tokens_per_state=4),
            "mla": AttentionSpec(block_size=64),
        }
    )
    layout = plan(spec, 1000)

    assert layout.tokens_per_state("indexer") == 4
    assert layout.tokens_per_state("mla") == 1


def test_an_unknown_member_is_refused_with_those_there_are() -> None:
    layout = plan(UniformSpec(members={"mla": AttentionSpec(block_size=64)}), 1000)

    with pytest.raises(InvalidSpecError, match="mla"):
        layout.tokens_per_state("indexer")


def test_members_that_agree_need_no_name() -> None:
    member = AttentionSpec(block_size=64, tokens_per_state=4)

    assert plan(UniformSpec(members={"a": member, "b": member}), 1000).tokens_per_state() == 4


def test_members_that_differ_have_to_be_named() -> None:
    """No size stands for another: slots of one member divided by the other's are wrong."""
    spec = UniformSpec(
        members={
            "indexer": AttentionSpec(block_size=64, tokens_per_state=4),
            "mla": AttentionSpec(block_size=64),
        }
    )

    with pytest.raises(InvalidSpecError, match=r"1.*4"):
        plan(spec, 1000).tokens_per_state()


def test_a_group_of_one_layer_has_no_members() -> None:
    with pytest.raises(InvalidSpecError, match="mla"):
        plan(AttentionSpec(block_size=64), 1000).tokens_per_state("mla")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, _through_pickle])
@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a_layout_can_be_sent_to_a_worker(
    spec: CacheSpec, copied: Callable[[BlockTableLayout], BlockTableLayout]
) -> None:
    layout = plan(spec, 1000)

    assert copied(layout) == layout
