"""Makes builders from a layout: the width goes to those that ask, and to no other."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import ClassVar, TypeVar, cast, overload

import torch

from bt_width import BlockTableLayout, BlockTableWidth, InvalidSpecError

from ._checks import as_tuple, indexed_device, require_layout, require_positive
from .common import CommonAttentionMetadata
from .protocol import (
    BuilderClass,
    CudagraphLevel,
    MetadataBuilder,
    PlainBuilder,
    PlainBuilderClass,
    WidthBuilder,
    WidthBuilderClass,
    least_cudagraph_support,
    name_of,
    requires_width,
)

Asking = TypeVar("Asking", bound=WidthBuilder[object])
Plain = TypeVar("Plain", bound=PlainBuilder[object])

MAX_UBATCHES = 64
"""Micro-batches at once that no engine overlaps."""


@overload
def create_metadata_builders(
    layout: BlockTableLayout,
    builder_classes: Sequence[WidthBuilderClass[Asking]],
    device: torch.device | str,
    *,
    num_ubatches: int = 1,
) -> tuple[tuple[Asking, ...], ...]: ...
@overload
def create_metadata_builders(
    layout: BlockTableLayout,
    builder_classes: Sequence[PlainBuilderClass[Plain]],
    device: torch.device | str,
    *,
    num_ubatches: int = 1,
) -> tuple[tuple[Plain, ...], ...]: ...
@overload
def create_metadata_builders(
    layout: BlockTableLayout,
    builder_classes: Sequence[BuilderClass],
    device: torch.device | str,
    *,
    num_ubatches: int = 1,
) -> tuple[tuple[MetadataBuilder[object], ...], ...]: ...
def create_metadata_builders(
    layout: BlockTableLayout,
    builder_classes: Sequence[BuilderClass],
    device: torch.device | str,
    *,
    num_ubatches: int = 1,
) -> tuple[tuple[MetadataBuilder[object], ...], ...]:
    """Return ``builders[ubatch][builder_class]``; no two share anything that changes.

    Args:
        layout: The group's plan; every builder holds this object.
        builder_classes: The classes, each with its flag.
        device: Where builders allocate.
        num_ubatches: Micro-batches that are built at once.

    Raises:
        InvalidSpecError: A class's flag and constructor disagree, a flag is not a bool, or
            the number of micro-batches is out of range.
    """
    require_ubatches(num_ubatches)
    require_layout(layout)
    classes = as_tuple("builder_classes", builder_classes)
    for builder_class in classes:
        _check_class(builder_class)
    where = indexed_device(device)
    return tuple(
        tuple(_create(layout, builder_class, where) for builder_class in classes)
        for _ in range(num_ubatches)
    )


def require_ubatches(num_ubatches: int) -> None:
    """Refuse a number of micro-batches that no engine overlaps: each has builders of its own."""
    require_positive("num_ubatches", num_ubatches)
    if num_ubatches > MAX_UBATCHES:
        raise InvalidSpecError(
            f"num_ubatches must be at most {MAX_UBATCHES}, not {num_ubatches}",
            num_ubatches=num_ubatches,
            max_ubatches=MAX_UBATCHES,
        )


def _create(
    layout: BlockTableLayout, builder_class: BuilderClass, device: torch.device
) -> MetadataBuilder[object]:
    if requires_width(builder_class):
        asking = cast(WidthBuilderClass[WidthBuilder[object]], builder_class)
        return asking(layout, device, block_table_width=layout.width)
    return cast(PlainBuilderClass[PlainBuilder[object]], builder_class)(layout, device)


def _check_class(builder_class: BuilderClass) -> None:
    """Refuse a class whose constructor does not fit its flag, before anything is built."""
    flag = requires_width(builder_class)
    try:
        signature = inspect.signature(cast(WidthBuilderClass[WidthBuilder[object]], builder_class))
    except (TypeError, ValueError):
        raise InvalidSpecError(
            f"{name_of(builder_class)} is not a class with a readable constructor",
            value=builder_class,
        ) from None
    arguments: tuple[object, object] = (None, None)
    keywords = {"block_table_width": None} if flag else {}
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        wanted = "(layout, device, *, block_table_width)" if flag else "(layout, device)"
        raise InvalidSpecError(
            f"{name_of(builder_class)} has requires_block_table_width {flag}, so that it is "
            f"called as {wanted}, but its constructor takes ({', '.join(signature.parameters)}): "
            f"{error}; change the flag or the constructor",
            builder_class=builder_class,
            flag=flag,
        ) from None
    _check_build(builder_class)


def _check_build(builder_class: BuilderClass) -> None:
    """Refuse a class without a ``build`` that takes a batch and nothing else."""
    build: object = getattr(builder_class, "build", None)
    if not callable(build):
        raise InvalidSpecError(
            f"{name_of(builder_class)} has no method build(common)", builder_class=builder_class
        )
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):
        return  # made of something that says nothing of its arguments
    is_function = inspect.isfunction(inspect.getattr_static(builder_class, "build", None))
    try:
        signature.bind(*((None, None) if is_function else (None,)))
    except TypeError as error:
        raise InvalidSpecError(
            f"{name_of(builder_class)}.build is called as build(common), but takes "
            f"({', '.join(signature.parameters)}): {error}",
            builder_class=builder_class,
        ) from None


def rebind_builder(builder: MetadataBuilder[object]) -> None:
    """Let a builder write its constants and buffers anew, if it keeps any."""
    rebind = getattr(builder, "rebind", None)
    if callable(rebind):
        rebind()


class _Composite:
    """Builds each part's metadata from the same batch; belongs to one thread at a time."""

    parts: ClassVar[tuple[BuilderClass, ...]]
    requires_block_table_width: ClassVar[bool]
    cudagraph_support: ClassVar[CudagraphLevel]

    def __init__(self, layout: BlockTableLayout, device: torch.device | str) -> None:
        (self.builders,) = create_metadata_builders(layout, self.parts, device)
        self.layout = layout

    def build(self, common: CommonAttentionMetadata) -> tuple[object, ...]:
        """Return the parts' metadata, in the order of the parts."""
        return tuple(builder.build(common) for builder in self.builders)

    def rebind(self) -> None:
        """Write every part's buffers anew."""
        for builder in self.builders:
            rebind_builder(builder)


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
        InvalidSpecError: No part is given, or a part's flag or level is unknown.
    """
    if not parts:
        raise InvalidSpecError("a composite needs at least one part")
    # a list, so that the flag of every part is checked
    asks = any([requires_width(part) for part in parts])
    name = f"Composite[{', '.join(name_of(part) for part in parts)}]"
    attributes = {
        "parts": parts,
        "requires_block_table_width": asks,
        "cudagraph_support": least_cudagraph_support(parts).level,
    }
    base = _AskingComposite if asks else _Composite
    return cast(BuilderClass, type(name, (base,), attributes))
