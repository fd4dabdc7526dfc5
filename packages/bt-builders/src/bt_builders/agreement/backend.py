"""What a backend reads, and which backends share a cache group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from bt_width import CacheSpec, InvalidSpecError, MultipleOf

from .protocol import BuilderClass

SpanUnit: TypeAlias = Literal["tokens", "states"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """One kind of attention kernel, as far as a block table concerns it.

    Attributes:
        name: What messages call it.
        builder_class: Its metadata builder's class.
        supported_kernel_block_sizes: The sizes it reads, in tokens.
        span: What a row must span a multiple of, or None.
        span_unit: What ``span`` counts.
    """

    name: str
    builder_class: BuilderClass
    supported_kernel_block_sizes: Sequence[int | MultipleOf]
    span: int | None = None
    span_unit: SpanUnit = "tokens"

    def __post_init__(self) -> None:
        """Keep the sizes as a tuple and check the span."""
        try:
            sizes = tuple(self.supported_kernel_block_sizes)
        except TypeError:
            raise InvalidSpecError(
                f"{self.name}: supported_kernel_block_sizes must be a sequence, "
                f"not {self.supported_kernel_block_sizes!r}",
                backend=self.name,
            ) from None
        object.__setattr__(self, "supported_kernel_block_sizes", sizes)
        if self.span is not None and (type(self.span) is not int or self.span < 1):
            raise InvalidSpecError(
                f"{self.name}: span must be a positive int or None, not {self.span!r}",
                backend=self.name,
                span=self.span,
            )
        if self.span_unit not in get_args(SpanUnit):
            raise InvalidSpecError(
                f'{self.name}: span_unit must be "tokens" or "states", not {self.span_unit!r}',
                backend=self.name,
                span_unit=self.span_unit,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """One cache group: the layers that share a table, and the backends that read it.

    Attributes:
        name: What messages call it.
        spec: What the group is.
        backends: The backends of its layers; each is built once.
    """

    name: str
    spec: CacheSpec
    backends: tuple[AttentionBackend, ...]

    def __post_init__(self) -> None:
        """Keep the backends as a tuple and check that their names tell them apart."""
        object.__setattr__(self, "backends", tuple(self.backends))
        names = [backend.name for backend in self.backends]
        if not names:
            raise InvalidSpecError(f"group {self.name!r} needs a backend", group=self.name)
        if len(set(names)) < len(names):
            raise InvalidSpecError(
                f"the backends of group {self.name!r} need names of their own, not {names}",
                group=self.name,
                names=names,
            )
