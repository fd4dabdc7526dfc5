"""What a type checker accepts; never run, only checked, as is every line of the tests."""

from typing import assert_never, assert_type

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    BlockTableWidth,
    CacheSpec,
    ContextParallel,
    LayerSpec,
    Location,
    MambaSpec,
    MultipleOf,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
    UniformSpec,
    get_block_table_width,
    select_kernel_block_size,
)


def allocate(width: BlockTableWidth) -> int:
    """A consumer of widths, as a table or a builder is."""
    return 4 * width


def a_width_comes_from_bt_width(layout: BlockTableLayout) -> None:
    assert_type(layout.width, BlockTableWidth)
    assert_type(get_block_table_width(295, 32, 16, token_alignment=None), BlockTableWidth)
    allocate(layout.width)
    allocate(get_block_table_width(295, 32))


def a_width_is_an_int_where_an_int_is_wanted(layout: BlockTableLayout) -> list[int]:
    return [0] * layout.width


def every_kind_is_handled(spec: LayerSpec) -> str:
    match spec:
        case AttentionSpec():
            return "attention"
        case SlidingWindowSpec():
            return "window"
        case MambaSpec():
            return "mamba"
        case RingSpec():
            return "ring"
        case _ as unreachable:
            assert_never(unreachable)


def every_group_is_handled(spec: CacheSpec) -> str:
    match spec:
        case UniformSpec():
            return every_kind_is_handled(spec.members[0][1])
        case _ as layer:
            return every_kind_is_handled(layer)


def a_plan_is_read(layout: BlockTableLayout) -> None:
    assert_type(layout.num_blocks(7), int)
    assert_type(layout.locate(7), Location)
    assert_type(layout.slot(7, layout.expand([1, 2])), int)
    assert_type(layout.limits.context_parallel, ContextParallel)
    assert_type(BlockTableLayout.from_json(layout.to_json()), BlockTableLayout)


def members_of_one_kind_or_of_several() -> UniformSpec:
    """The mapping may be typed by its kind: a mapping's values are only read."""
    mla: dict[str, AttentionSpec] = {"mla": AttentionSpec(block_size=64)}
    return UniformSpec(members=mla)


def sizes_by_name_or_in_sequence() -> None:
    listed: list[list[int]] = [[64], [32, 64]]
    named: dict[str, list[int | MultipleOf]] = {"FlashMLA": [64], "FlashInfer": [MultipleOf(16)]}
    select_kernel_block_size(64, listed)
    select_kernel_block_size(64, named)
    select_kernel_block_size(64, [(16, MultipleOf(32))])


def limits() -> ServingLimits:
    return ServingLimits(max_model_len=1000, max_num_reqs=4, max_num_batched_tokens=64)
