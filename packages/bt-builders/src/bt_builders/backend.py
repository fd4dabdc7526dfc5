"""Declares what a backend reads, and which backends share a cache group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    InvalidSpecError,
    MambaSpec,
    MultipleOf,
    NoCommonBlockSizeError,
    RingSpec,
    select_kernel_block_size,
)
from bt_width.specs import layers_of

from ._checks import as_tuple, require_positive
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
        """Keep the sizes as a tuple and check what has a form."""
        if not isinstance(self.name, str):
            raise InvalidSpecError(
                f"a backend's name must be a str, not {self.name!r}", value=self.name
            )
        name = f"{self.name}: supported_kernel_block_sizes"
        sizes = as_tuple(name, self.supported_kernel_block_sizes)
        object.__setattr__(self, "supported_kernel_block_sizes", sizes)
        if self.span is not None:
            require_positive(f"{self.name}: span", self.span)
        if not isinstance(self.span_unit, str) or self.span_unit not in get_args(SpanUnit):
            raise InvalidSpecError(
                f'{self.name}: span_unit must be "tokens" or "states", not {self.span_unit!r}',
                backend=self.name,
                span_unit=self.span_unit,
            )

    def span_tokens(self, spec: CacheSpec) -> int:
        """Return the tokens that a row of ``spec`` must span a multiple of; 1 without a span.

        Where the span counts states, every layer of the group has to complete them.
        """
        if self.span is None:
            return 1
        return self.span * (_tokens_per_whole_states(spec) if self.span_unit == "states" else 1)

    def check(self, layout: BlockTableLayout) -> None:
        """Refuse a layout whose tables this backend's kernels cannot read.

        ``init_attention`` plans layouts that pass; others can be checked here.

        Raises:
            NoCommonBlockSizeError: They do not read its kernel blocks.
            InvalidSpecError: Its rows do not span what they need.
        """
        size, sizes = layout.kernel_block_size, self.supported_kernel_block_sizes
        if can_split(layout.spec) and select_kernel_block_size(size, {self.name: sizes}) != size:
            raise NoCommonBlockSizeError(
                f"{self.name} does not read kernel blocks of {size} tokens, only {list(sizes)}",
                backend=self.name,
                kernel_block_size=size,
            )
        row = layout.width * layout.kernel_block_size
        span = self.span_tokens(layout.spec)
        if row % span:
            raise InvalidSpecError(
                f"{self.name} needs rows that span a multiple of {span} tokens, "
                f"they span {row}: {layout.explain()}",
                backend=self.name,
                span=span,
                row=row,
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
        if not isinstance(self.name, str):
            raise InvalidSpecError(
                f"a group's name must be a str, not {self.name!r}", value=self.name
            )
        if not isinstance(self.spec, CacheSpec):
            raise InvalidSpecError(
                f"group {self.name!r} needs a cache spec, not {self.spec!r}", group=self.name
            )
        backends = as_tuple(f"the backends of group {self.name!r}", self.backends, AttentionBackend)
        object.__setattr__(self, "backends", backends)
        names = [backend.name for backend in self.backends]
        if not names:
            raise InvalidSpecError(f"group {self.name!r} needs a backend", group=self.name)
        if len(set(names)) < len(names):
            raise InvalidSpecError(
                f"the backends of group {self.name!r} need names of their own, not {names}",
                group=self.name,
                names=names,
            )


def can_split(spec: CacheSpec) -> bool:
    """Return whether a block may be split: a recurrent or ring group's is one column."""
    return not isinstance(layers_of(spec)[0], MambaSpec | RingSpec)


def _tokens_per_whole_states(spec: CacheSpec) -> int:
    """Return the tokens after which every layer of the group has completed a state."""
    layers = layers_of(spec)
    sizes = [layer.tokens_per_state for layer in layers if isinstance(layer, AttentionSpec)]
    return math.lcm(*sizes)
