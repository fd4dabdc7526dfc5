"""Builders of other people's own; the type checker accepts each of them."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from bt_builders import (
    AttentionBackend,
    AttentionSetup,
    BuilderClass,
    CommonAttentionMetadata,
    PlainBuilderClass,
    WidthBuilderClass,
    create_metadata_builders,
)
from bt_width import BlockTableLayout, BlockTableWidth


@dataclass(frozen=True)
class RowCounts:
    """What these builders build."""

    rows: int
    columns: int


class Expanding:
    """Keeps a table of its own, and asks for its width."""

    requires_block_table_width: ClassVar[Literal[True]] = True
    cudagraph_support: ClassVar[Literal["uniform"]] = "uniform"

    def __init__(
        self,
        layout: BlockTableLayout,
        device: torch.device,
        *,
        block_table_width: BlockTableWidth,
    ) -> None:
        rows = layout.limits.max_num_batched_tokens
        self.table = torch.zeros(rows, block_table_width, dtype=torch.int32, device=device)

    def build(self, common: CommonAttentionMetadata) -> RowCounts:
        return RowCounts(common.num_tokens, self.table.shape[1])


class Reading:
    """Reads the group's table as it is; further keywords of its own have defaults."""

    requires_block_table_width: ClassVar[Literal[False]] = False
    cudagraph_support: ClassVar[Literal["never"]] = "never"

    def __init__(
        self, layout: BlockTableLayout, device: torch.device | str, *, verbose: bool = False
    ) -> None:
        self.layout = layout
        self.verbose = verbose

    def build(self, common: CommonAttentionMetadata) -> RowCounts:
        return RowCounts(*common.block_table.shape)


asking: WidthBuilderClass[Expanding] = Expanding
plain: PlainBuilderClass[Reading] = Reading
both: list[BuilderClass] = [Expanding, Reading]
backend = AttentionBackend(name="mine", builder_class=Expanding, supported_kernel_block_sizes=[64])


def metadata_of(setup: AttentionSetup, common: CommonAttentionMetadata) -> RowCounts:
    """A builder that is asked for by its class builds that class's metadata, not ``Any``."""
    return setup.groups[0].builder(Expanding).build(common)


def metadata_of_each(layout: BlockTableLayout, common: CommonAttentionMetadata) -> list[RowCounts]:
    """So does one that is made without a setup."""
    (made,) = create_metadata_builders(layout, [Reading], "cpu")
    return [builder.build(common) for builder in made]
