"""Several builders as one: it asks for the width if a part asks, and hands it to that part."""

from __future__ import annotations

from typing import ClassVar, cast

import torch

from bt_width import BlockTableLayout, BlockTableWidth, InvalidSpecError

from ..arguments import require_layout
from ..batch.common import CommonAttentionMetadata
from .create import create_metadata_builders
from .declarations import least_cudagraph_support, name_of, requires_width
from .protocol import BuilderClass, CudagraphLevel


class _Composite:
    """Builds each part's metadata from the same batch."""

    parts: ClassVar[tuple[BuilderClass, ...]]
    requires_block_table_width: ClassVar[bool]
    cudagraph_support: ClassVar[CudagraphLevel]

    def __init__(self, layout: BlockTableLayout, device: torch.device | str) -> None:
        (self.builders,) = create_metadata_builders(layout, self.parts, device)
        self.layout = layout

    def build(self, common: CommonAttentionMetadata) -> tuple[object, ...]:
        """Return the parts' metadata, in the order of the parts."""
        return tuple(builder.build(common) for builder in self.builders)


class _AskingComposite(_Composite):
    def __init__(
        self,
        layout: BlockTableLayout,
        device: torch.device | str,
        *,
        block_table_width: BlockTableWidth,
    ) -> None:
        require_layout(layout)
        # the parts that ask are handed the layout's own width, which is this one
        if block_table_width != layout.width:
            raise InvalidSpecError(
                f"block_table_width {block_table_width} is not the layout's {layout.width}",
                block_table_width=block_table_width,
            )
        super().__init__(layout, device)


def compose_builders(*parts: BuilderClass) -> BuilderClass:
    """Return a builder class whose ``build`` returns the parts' metadata as a tuple.

    Raises:
        InvalidSpecError: There is no part, or a part's flag or level is not one.
    """
    if not parts:
        raise InvalidSpecError("a composite needs at least one part")
    # a list, so that the flag of every part is checked
    asks = any([requires_width(part) for part in parts])
    name = f"Composite[{', '.join(name_of(part) for part in parts)}]"
    facts = {
        "parts": parts,
        "requires_block_table_width": asks,
        "cudagraph_support": least_cudagraph_support(parts).level,
    }
    base = _AskingComposite if asks else _Composite
    return cast(BuilderClass, type(name, (base,), facts))
