"""Builders made from a layout: the width goes to those that ask, and to no other."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import cast

import torch

from bt_width import BlockTableLayout, InvalidSpecError

from ..arguments import as_tuple, indexed_device, require_layout, require_positive
from .declarations import name_of, requires_width
from .protocol import BuilderClass, MetadataBuilder, PlainBuilderClass, WidthBuilderClass

MAX_UBATCHES = 64
"""Micro-batches at once that no engine overlaps."""


def create_metadata_builders(
    layout: BlockTableLayout,
    builder_classes: Sequence[BuilderClass],
    device: torch.device | str,
    *,
    num_ubatches: int = 1,
) -> tuple[tuple[MetadataBuilder, ...], ...]:
    """Return ``builders[ubatch][builder_class]``; no two share anything that changes.

    Args:
        layout: The group's plan; every builder holds this object.
        builder_classes: The classes, each with its flag.
        device: Where builders allocate.
        num_ubatches: Micro-batches that are built at once.

    Raises:
        InvalidSpecError: A class's flag and constructor disagree, a flag is no bool, or
            there is no micro-batch, or far too many.
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
) -> MetadataBuilder:
    if requires_width(builder_class):
        asking = cast(WidthBuilderClass, builder_class)
        return asking(layout, device, block_table_width=layout.width)
    return cast(PlainBuilderClass, builder_class)(layout, device)


def _check_class(builder_class: BuilderClass) -> None:
    """Refuse a class whose constructor does not fit its flag, before anything is built."""
    flag = requires_width(builder_class)
    try:
        signature = inspect.signature(cast(WidthBuilderClass, builder_class))
    except (TypeError, ValueError):
        raise InvalidSpecError(
            f"{name_of(builder_class)} is no class with a readable constructor",
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
