"""Describes what a metadata builder's class must offer; all that a builder of one's own needs.

The flag says which constructor a class has. It is read off what the constructor returns,
so that a type checker compares flag and constructor in one step: a class object that had to
offer both at once would go unchecked by those that look at its attributes alone.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

import torch

from bt_width import BlockTableLayout, BlockTableWidth

from ..batch.common import CommonAttentionMetadata

CudagraphLevel: TypeAlias = Literal["always", "uniform", "single", "never"]
"""Which batches a CUDA graph may hold, from any batch to none.

"always": any; "uniform": equal query lengths; "single": one token a request.
"""

Metadata_co = TypeVar("Metadata_co", covariant=True)


class MetadataBuilder(Protocol[Metadata_co]):
    """Turns one step's batch into what a backend's kernels take."""

    def build(self, common: CommonAttentionMetadata, /) -> Metadata_co:
        """Return the backend's own metadata of ``common``."""


class WidthBuilder(MetadataBuilder[Metadata_co], Protocol[Metadata_co]):
    """A builder that keeps a table of its own and asks for the width.

    Its class annotates the flag ``ClassVar[Literal[True]]``.
    """

    requires_block_table_width: ClassVar[Literal[True]]
    # a ``CudagraphLevel``; any narrower literal of it is one, which no checker takes as a ClassVar
    cudagraph_support: ClassVar[Any]


class PlainBuilder(MetadataBuilder[Metadata_co], Protocol[Metadata_co]):
    """A builder that reads the group's table as it is.

    Its class annotates the flag ``ClassVar[Literal[False]]``.
    """

    requires_block_table_width: ClassVar[Literal[False]]
    # a ``CudagraphLevel``; any narrower literal of it is one, which no checker takes as a ClassVar
    cudagraph_support: ClassVar[Any]


WidthBuilder_co = TypeVar("WidthBuilder_co", bound=WidthBuilder[object], covariant=True)
PlainBuilder_co = TypeVar("PlainBuilder_co", bound=PlainBuilder[object], covariant=True)


class WidthBuilderClass(Protocol[WidthBuilder_co]):
    """The class of a builder that asks for the width."""

    def __call__(
        self,
        layout: BlockTableLayout,
        device: torch.device,
        /,
        *,
        block_table_width: BlockTableWidth,
    ) -> WidthBuilder_co:
        """Allocate for the largest step of ``layout``."""


class PlainBuilderClass(Protocol[PlainBuilder_co]):
    """The class of a builder that does not ask."""

    def __call__(self, layout: BlockTableLayout, device: torch.device, /) -> PlainBuilder_co:
        """Allocate for the largest step of ``layout``."""


BuilderClass: TypeAlias = (
    WidthBuilderClass[WidthBuilder[object]] | PlainBuilderClass[PlainBuilder[object]]
)
"""The class of a metadata builder, by what its flag says."""
