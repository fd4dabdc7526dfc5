"""What a builder's class says of itself: whether it asks for the width, what a graph may hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from bt_width import InvalidSpecError

from .protocol import BuilderClass, CudagraphLevel

_LEVELS: tuple[CudagraphLevel, ...] = get_args(CudagraphLevel)


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
        InvalidSpecError: The flag is no bool.
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
