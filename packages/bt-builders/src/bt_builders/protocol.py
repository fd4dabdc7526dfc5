"""Describes what a metadata builder's class must offer, and reads it: its flag, its CUDA graphs.

The flag says which constructor a class has. It is read off what the constructor returns,
so that a type checker compares flag and constructor in one step: a class object that had to
offer both at once would go unchecked by those that look at its attributes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

import torch

from bt_width import BlockTableLayout, BlockTableWidth, InvalidSpecError

from .common import CommonAttentionMetadata

CudagraphLevel: TypeAlias = Literal["always", "uniform", "single", "never"]
"""Which batches a CUDA graph may hold, from any batch to none.

"always": any; "uniform": equal query lengths; "single": one token a request.
"""

_LEVELS: tuple[CudagraphLevel, ...] = get_args(CudagraphLevel)

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


class CudagraphSupport(NamedTuple):
    """The batches that all of several builders allow in a CUDA graph.

    Attributes:
        level: The least level of all.
        limited_by: The name of the first builder with that level; empty without builders.
    """

    level: CudagraphLevel
    limited_by: str


def requires_width(builder_class: BuilderClass) -> bool:
    """Return a class's flag; a class without one does not ask.

    Raises:
        InvalidSpecError: The flag is not a bool.
    """
    flag: object = getattr(builder_class, "requires_block_table_width", False)
    if not isinstance(flag, bool):
        raise InvalidSpecError(
            f"{name_of(builder_class)}.requires_block_table_width must be True or False, "
            f"not {flag!r}; annotate it ClassVar[Literal[True]] or ClassVar[Literal[False]]",
            value=flag,
        )
    return flag


def least_cudagraph_support(builder_classes: Sequence[BuilderClass]) -> CudagraphSupport:
    """Return what all of ``builder_classes`` allow, and which of them limits it.

    Raises:
        InvalidSpecError: A class says nothing of it, or another word.
    """
    least = CudagraphSupport("always", "")
    for builder_class in builder_classes:
        level: object = getattr(builder_class, "cudagraph_support", None)
        if level not in _LEVELS:
            raise InvalidSpecError(
                f"{name_of(builder_class)}.cudagraph_support must be one of {list(_LEVELS)}, "
                f"not {level!r}",
                value=level,
            )
        if not least.limited_by or _LEVELS.index(level) > _LEVELS.index(least.level):
            least = CudagraphSupport(level, name_of(builder_class))
    return least


def name_of(builder_class: BuilderClass) -> str:
    """Return the name of a builder's class for messages."""
    return str(getattr(builder_class, "__name__", builder_class))
