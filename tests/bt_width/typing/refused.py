"""What a type checker refuses: test_typing.py compares each marked line with mypy's answer.

The configuration of the whole tree leaves this file out; it is checked by that test alone.
"""

from typing import assert_never

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    BlockTableWidth,
    CacheSpec,
    LayerSpec,
    MambaSpec,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
    UniformSpec,
    get_block_table_width,
)


def allocate(width: BlockTableWidth) -> int:
    return 4 * width


def an_int_is_no_width(layout: BlockTableLayout) -> None:
    allocate(5470)  # refused: arg-type
    allocate(layout.max_num_blocks)  # refused: arg-type
    allocate(layout.width + 1)  # refused: arg-type
    allocate(layout.width * 2)  # refused: arg-type


def a_layout_is_no_width(layout: BlockTableLayout) -> None:
    allocate(layout)  # refused: arg-type


def a_kind_is_forgotten(spec: LayerSpec) -> str:
    match spec:
        case AttentionSpec():
            return "attention"
        case SlidingWindowSpec():
            return "window"
        case MambaSpec():
            return "mamba"
        case _ as unreachable:
            assert_never(unreachable)  # refused: arg-type


def the_uniform_group_is_forgotten(spec: CacheSpec) -> LayerSpec:
    return spec  # refused: return-value


def a_kind_is_never_another(ring: RingSpec) -> SlidingWindowSpec:
    return ring  # refused: return-value


def a_value_does_not_change(layout: BlockTableLayout, spec: AttentionSpec) -> None:
    spec.block_size = 32  # refused: misc
    layout.width = get_block_table_width(1, 16)  # refused: misc


def an_argument_says_its_name() -> None:
    AttentionSpec(64)  # refused: call-arg
    ServingLimits(1000, 4, 64)  # refused: call-arg
    get_block_table_width(295, 32, 32, 128)  # refused: call-arg


def a_mode_is_one_of_two() -> None:
    MambaSpec(block_size=64, mode="all")  # refused: arg-type


def groups_are_not_nested(inner: UniformSpec) -> None:
    UniformSpec(members={"inner": inner})  # refused: arg-type


def a_field_that_is_not_there(spec: RingSpec) -> int:
    return spec.window  # refused: attr-defined, no-any-return
