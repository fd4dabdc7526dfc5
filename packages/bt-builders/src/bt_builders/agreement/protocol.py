"""What a metadata builder's class must offer; the only file a builder of one's own needs."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

import torch

from bt_width import BlockTableLayout, BlockTableWidth

from ..batch.common import CommonAttentionMetadata

CudagraphLevel: TypeAlias = Literal["always", "uniform", "single", "never"]
"""Which batches a CUDA graph may hold, from any batch to none.

"always": any; "uniform": equal query lengths; "single": one token a request.
"""


class MetadataBuilder(Protocol):
    """Turns one step's batch into what a backend's kernels take."""

    def build(self, common: CommonAttentionMetadata, /) -> Any:
        """Return the backend's own metadata of ``common``."""


class WidthBuilderClass(Protocol):
    """The class of a builder that keeps a table of its own and asks for the width.

    Such a class annotates its flag ``ClassVar[Literal[True]]``.
    """

    @property
    def requires_block_table_width(self) -> Literal[True]:
        """Whether the constructor takes the width."""

    @property
    def cudagraph_support(self) -> CudagraphLevel:
        """Which batches a CUDA graph may hold."""

    def __call__(
        self,
        layout: BlockTableLayout,
        device: torch.device,
        /,
        *,
        block_table_width: BlockTableWidth,
    ) -> MetadataBuilder:
        """Allocate for the largest step of ``layout``."""


class PlainBuilderClass(Protocol):
    """The class of a builder that reads the group's table as it is.

    Such a class annotates its flag ``ClassVar[Literal[False]]``.
    """

    @property
    def requires_block_table_width(self) -> Literal[False]:
        """Whether the constructor takes the width."""

    @property
    def cudagraph_support(self) -> CudagraphLevel:
        """Which batches a CUDA graph may hold."""

    def __call__(self, layout: BlockTableLayout, device: torch.device, /) -> MetadataBuilder:
        """Allocate for the largest step of ``layout``."""


BuilderClass: TypeAlias = WidthBuilderClass | PlainBuilderClass
"""The class of a metadata builder, by what its flag says."""
