"""Builders whose flag, constructor and ``build`` disagree; each line that says so is an error."""

from typing import ClassVar, Literal

import torch

from bt_builders import AttentionBackend, BuilderClass, CommonAttentionMetadata
from bt_width import BlockTableLayout, BlockTableWidth


class Building:
    """What they have in common."""

    cudagraph_support: ClassVar[Literal["never"]] = "never"

    def build(self, common: CommonAttentionMetadata) -> int:
        return common.num_reqs


class WithoutLiteral(Building):
    """Its flag is any bool, so that its constructor is unknown."""

    requires_block_table_width = True

    def __init__(
        self,
        layout: BlockTableLayout,
        device: torch.device,
        *,
        block_table_width: BlockTableWidth,
    ) -> None: ...


class AsksAndDoesNotTake(Building):
    """Its flag asks for a width that its constructor has no place for."""

    requires_block_table_width: ClassVar[Literal[True]] = True

    def __init__(self, layout: BlockTableLayout, device: torch.device) -> None: ...


class TakesAndDoesNotAsk(Building):
    """Its constructor needs a width that its flag does not ask for."""

    requires_block_table_width: ClassVar[Literal[False]] = False

    def __init__(
        self,
        layout: BlockTableLayout,
        device: torch.device,
        *,
        block_table_width: BlockTableWidth,
    ) -> None: ...


class TakesALayoutForAWidth(Building):
    """It mistakes the layout for the width."""

    requires_block_table_width: ClassVar[Literal[True]] = True

    def __init__(
        self,
        layout: BlockTableLayout,
        device: torch.device,
        *,
        block_table_width: BlockTableLayout,
    ) -> None: ...


class BuildsNothing:
    """It has no ``build``."""

    requires_block_table_width: ClassVar[Literal[False]] = False
    cudagraph_support: ClassVar[Literal["never"]] = "never"

    def __init__(self, layout: BlockTableLayout, device: torch.device) -> None: ...


class BuildsOfAnotherThing:
    """Its ``build`` takes a layout."""

    requires_block_table_width: ClassVar[Literal[False]] = False
    cudagraph_support: ClassVar[Literal["never"]] = "never"

    def __init__(self, layout: BlockTableLayout, device: torch.device) -> None: ...

    def build(self, common: BlockTableLayout) -> int:
        return 0


class BuildsOfTwoThings:
    """Its ``build`` takes more than a batch."""

    requires_block_table_width: ClassVar[Literal[False]] = False
    cudagraph_support: ClassVar[Literal["never"]] = "never"

    def __init__(self, layout: BlockTableLayout, device: torch.device) -> None: ...

    def build(self, common: CommonAttentionMetadata, fast: bool) -> int:
        return 0


first: BuilderClass = WithoutLiteral  # refused: assignment
second: BuilderClass = AsksAndDoesNotTake  # refused: assignment
third: BuilderClass = TakesAndDoesNotAsk  # refused: assignment
fourth: BuilderClass = TakesALayoutForAWidth  # refused: assignment
fifth: BuilderClass = BuildsNothing  # refused: assignment
sixth: BuilderClass = BuildsOfAnotherThing  # refused: assignment
seventh: BuilderClass = BuildsOfTwoThings  # refused: assignment
backend = AttentionBackend(
    name="mine",
    builder_class=WithoutLiteral,  # refused: arg-type
    supported_kernel_block_sizes=[64],
)
