"""A layout is planned once, and everything about a row is read off it."""

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.kinds import ALIGN, EVERY_KIND
from tests.support.plans import plan, serving_limits

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    UniformSpec,
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


def test_a_layout_names_its_kind() -> None:
    kinds = [plan(case.values[0], 1000).kind for case in EVERY_KIND]

    assert kinds == ["attention", "attention", "window", "mamba", "mamba", "ring", "attention"]


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


def test_a_layout_is_made_of_its_causes_and_nothing_else() -> None:
    """No derived number can be handed in or set, so that none disagrees with them."""
    layout: Any = plan(AttentionSpec(block_size=64), 1000)

    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.width = 17
    assert {field.name for field in dataclasses.fields(layout)} == {
        "spec",
        "limits",
        "kernel_block_size",
    }
    for parameter in inspect.signature(BlockTableLayout).parameters.values():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY


def test_a_layout_that_was_asked_is_as_one_that_was_not() -> None:
    """What it keeps of its answers is not compared, shown or sent."""
    asked, fresh = (plan(AttentionSpec(block_size=64), 1000) for _ in range(2))
    assert asked.width == 16

    assert asked == fresh
    assert hash(asked) == hash(fresh)
    assert repr(asked) == repr(fresh)
    assert asked.digest() == fresh.digest()
    assert pickle.dumps(asked) == pickle.dumps(fresh)


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


def test_the_alignment_declared_is_the_alignment_planned() -> None:
    for alignment, width in ((None, 13), (1, 13), (32, 14), (48, 15), (256, 16), (512, 32)):
        spec = AttentionSpec(block_size=16, token_alignment=alignment)

        assert plan(spec, 13 * 16).width == width


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, _through_pickle])
@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a_layout_can_be_sent_to_a_worker(
    spec: CacheSpec, copied: Callable[[BlockTableLayout], BlockTableLayout]
) -> None:
    layout = plan(spec, 1000)

    assert copied(layout) == layout
