"""Five wrong uses; mypy refuses each marked line with the code that it names."""

from typing import ClassVar, Literal, assert_never

import torch
from token_attention import TokenTableBuilder

from bt_builders import AttentionBackend, CommonAttentionMetadata
from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    LayerSpec,
    MambaSpec,
    MultipleOf,
    SlidingWindowSpec,
)


def an_int_is_no_width(layout: BlockTableLayout, device: torch.device) -> None:
    TokenTableBuilder(layout, device, block_table_width=5470)  # refused: arg-type


class BuilderWithoutTheFlag:
    """It takes the width, and does not say that it asks for it."""

    cudagraph_support: ClassVar[Literal["never"]] = "never"

    def __init__(
        self, layout: BlockTableLayout, device: torch.device, *, block_table_width: int
    ) -> None: ...

    def build(self, common: CommonAttentionMetadata) -> int:
        return common.num_reqs


backend = AttentionBackend(
    name="mine",
    builder_class=BuilderWithoutTheFlag,  # refused: arg-type
    supported_kernel_block_sizes=[MultipleOf(16)],
)


def a_group_kind_is_missing(spec: LayerSpec) -> str:
    match spec:
        case AttentionSpec() | SlidingWindowSpec():
            return "tokens"
        case MambaSpec():
            return "states"
        case _ as missing:
            assert_never(missing)  # refused: arg-type


def a_layout_is_no_width(layout: BlockTableLayout, device: torch.device) -> None:
    TokenTableBuilder(layout, device, block_table_width=layout)  # refused: arg-type


def a_field_does_not_exist(common: CommonAttentionMetadata) -> torch.Tensor:
    return common.block_tables  # refused: attr-defined, no-any-return
