"""Turns groups into builders, in the only order there is: agree, plan, then build."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from bt_width import (
    BlockTableLayout,
    CacheSpec,
    InvalidSpecError,
    LayerSpec,
    MambaSpec,
    NoCommonBlockSizeError,
    RingSpec,
    ServingLimits,
    UniformSpec,
    select_kernel_block_size,
)
from bt_width.specs import layers_of

from ._checks import as_tuple, indexed_device
from .backend import AttentionGroup, can_split
from .create import create_metadata_builders, rebind_builder, require_ubatches
from .protocol import CudagraphSupport, MetadataBuilder, least_cudagraph_support

Builder = TypeVar("Builder")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """One cache group, planned and built.

    Never changes; its builders belong to one thread at a time each.

    Attributes:
        name: The group's name, as declared.
        layout: Its plan; its tables and every one of its builders hold this object.
        ubatches: The builders of each micro-batch, in the order of the group's backends.
    """

    name: str
    layout: BlockTableLayout
    ubatches: tuple[tuple[MetadataBuilder[object], ...], ...]

    @property
    def builders(self) -> tuple[MetadataBuilder[object], ...]:
        """The builders of micro-batch 0, in the order of the group's backends."""
        return self.ubatches[0]

    def builders_of(self, ubatch: int) -> tuple[MetadataBuilder[object], ...]:
        """Return the builders of one micro-batch.

        Raises:
            InvalidSpecError: ``ubatch`` is not in 0..num_ubatches - 1.
        """
        if type(ubatch) is not int or not 0 <= ubatch < len(self.ubatches):
            raise InvalidSpecError(
                f"ubatch must be in 0..{len(self.ubatches) - 1}, the micro-batches of group "
                f"{self.name!r}, not {ubatch!r}",
                group=self.name,
                ubatch=ubatch,
                num_ubatches=len(self.ubatches),
            )
        return self.ubatches[ubatch]

    def builder(self, builder_class: type[Builder], *, ubatch: int = 0) -> Builder:
        """Return the group's one builder of a class, typed as that class.

        Raises:
            InvalidSpecError: The group has no builder of this class, or several.
        """
        found = [each for each in self.builders_of(ubatch) if isinstance(each, builder_class)]
        if len(found) != 1:
            raise InvalidSpecError(
                f"group {self.name!r} has {len(found)} builders of class {builder_class.__name__}, "
                f"not one: {[type(each).__name__ for each in self.builders]}",
                group=self.name,
                builder_class=builder_class,
            )
        return found[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSetup:
    """All cache groups, planned and built from one agreement.

    Its builders belong to one thread at a time each; the rest never changes.

    Attributes:
        groups: The groups, in the order of their tables.
        cudagraph_support: What all builders allow, and which of them limits it.
    """

    groups: tuple[PlannedGroup, ...]
    cudagraph_support: CudagraphSupport

    @property
    def layouts(self) -> tuple[BlockTableLayout, ...]:
        """The groups' plans: what tables are made from."""
        return tuple(group.layout for group in self.groups)

    def rebind(self) -> None:
        """Write every builder's constants and buffers anew, in place.

        For when memory was released and mapped again and what it held is lost. What a
        CUDA graph captured stays at its address. Call it beside the tables' ``rebind``,
        while no step is in flight; builders of your own are asked if they have the method.
        """
        for group in self.groups:
            for builders in group.ubatches:
                for builder in builders:
                    rebind_builder(builder)


def prepare_kernel_block_sizes(groups: Sequence[AttentionGroup]) -> tuple[int, ...]:
    """Return one kernel block size per cache group, which all its backends read.

    A recurrent or ring group is never split: its block is one column, whatever its
    backends read elsewhere.

    Raises:
        NoCommonBlockSizeError: A group's backends read no common divisor of its block.
        InvalidSpecError: A backend lists no size.
    """
    found = as_tuple("groups", groups, AttentionGroup)
    return tuple(_kernel_block_size(group) for group in found)


def _kernel_block_size(group: AttentionGroup) -> int:
    layer = layers_of(group.spec)[0]
    if not can_split(group.spec):
        return layer.block_size
    supported = {backend.name: backend.supported_kernel_block_sizes for backend in group.backends}
    try:
        return select_kernel_block_size(layer.block_size, supported)
    except NoCommonBlockSizeError as error:
        raise NoCommonBlockSizeError(
            f"group {group.name!r}: {error}", **error.details, group=group.name
        ) from None


def init_attention(
    groups: Sequence[AttentionGroup],
    limits: ServingLimits,
    device: torch.device | str,
    *,
    num_ubatches: int = 1,
) -> AttentionSetup:
    """Agree on kernel blocks and alignment, plan every layout, then make every builder.

    Args:
        groups: The cache groups, in the order of their tables.
        limits: What the server allows, the same for all groups.
        device: Where builders allocate.
        num_ubatches: Micro-batches that are built at once.

    Raises:
        NoCommonBlockSizeError: A group's backends read no common kernel block.
        InvalidSpecError: A group's span, spec and limits do not go together, a builder's
            flag and constructor disagree, or an argument is of a wrong kind.
    """
    declared = as_tuple("groups", groups, AttentionGroup)
    require_ubatches(num_ubatches)
    device = indexed_device(device)
    # every group is planned before the first builder allocates anything
    layouts = [_plan(group, limits) for group in declared]
    support = least_cudagraph_support(
        [backend.builder_class for group in declared for backend in group.backends]
    )
    return AttentionSetup(
        groups=tuple(
            PlannedGroup(
                name=group.name,
                layout=layout,
                ubatches=create_metadata_builders(
                    layout,
                    [backend.builder_class for backend in group.backends],
                    device,
                    num_ubatches=num_ubatches,
                ),
            )
            for group, layout in zip(declared, layouts, strict=True)
        ),
        cudagraph_support=support,
    )


def _plan(group: AttentionGroup, limits: ServingLimits) -> BlockTableLayout:
    """Return the layout that all of a group's backends can read."""
    layout = BlockTableLayout.plan(_aligned_spec(group), limits, _kernel_block_size(group))
    for backend in group.backends:
        backend.check(layout)
    return layout


def _aligned_spec(group: AttentionGroup) -> CacheSpec:
    """Return the group's spec, aligned to what it and all its backends need.

    Raises:
        InvalidSpecError: A backend needs a span in a recurrent or ring group, whose rows
            span no tokens.
    """
    spans = [
        backend.span_tokens(group.spec) for backend in group.backends if backend.span is not None
    ]
    if not spans:
        return group.spec
    if isinstance(group.spec, UniformSpec):
        return UniformSpec(
            members={name: _align(group.name, member, spans) for name, member in group.spec.members}
        )
    return _align(group.name, group.spec, spans)


def _align(group: str, spec: LayerSpec, spans: list[int]) -> LayerSpec:
    if isinstance(spec, MambaSpec | RingSpec):
        raise InvalidSpecError(
            f"group {group!r}: a backend needs rows that span a multiple of {math.lcm(*spans)} "
            f"tokens, but a {type(spec).__name__}'s rows span none",
            group=group,
            spans=spans,
        )
    return replace(spec, token_alignment=math.lcm(spec.token_alignment or 1, *spans))
