"""Plans layouts for vLLM's cache groups, and compares vLLM's tables with them.

Specs are told apart by the names of their classes, so that nothing of vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bt_tables.sanitizer import FaultKind, Finding
from bt_width import (
    AttentionSpec,
    BlockTableError,
    BlockTableLayout,
    InvalidSpecError,
    LayerSpec,
    MambaSpec,
    ServingLimits,
    SlidingWindowSpec,
)

_NOT_CHECKED = {
    "EncoderOnlyAttentionSpec": "encoder-only layers keep nothing between steps",
    "CrossAttentionSpec": "cross-attention tables are as long as the encoder's input",
    "ChunkedLocalAttentionSpec": "blocks of earlier chunks are given back by a rule not known here",
    "HiSparseHotSpec": "blocks move between host and device",
    "HiSparseResidentSpec": "blocks move between host and device",
}


class NotCheckedError(InvalidSpecError):
    """Something of vLLM's is not checked; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """One of vLLM's cache groups that is checked.

    Attributes:
        index: Its place among vLLM's groups.
        layout: The layout planned for it.
    """

    index: int
    layout: BlockTableLayout


def plan_groups(
    groups: Sequence[Any], limits: ServingLimits
) -> tuple[tuple[PlannedGroup, ...], tuple[str, ...]]:
    """Return the groups that can be checked, and a sentence for each that cannot.

    Args:
        groups: ``kv_cache_groups`` of a ``KVCacheConfig``.
        limits: The runner's.
    """
    planned, left_out = [], []
    for index, group in enumerate(groups):
        try:
            spec = _spec_of(group.kv_cache_spec, limits)
            layout = BlockTableLayout.plan(spec, limits)
        except BlockTableError as error:
            left_out.append(f"group {index} is not checked: {error}")
        else:
            planned.append(PlannedGroup(index=index, layout=layout))
    return tuple(planned), tuple(left_out)


def shape_findings(
    groups: Sequence[PlannedGroup], widths: Sequence[int], derivations: Sequence[str]
) -> Iterator[Finding]:
    """Yield a finding for each table that is not as wide as planned, with both derivations.

    Args:
        groups: The groups.
        widths: [groups] columns of vLLM's own tables.
        derivations: [groups] how vLLM came to them.
    """
    for number, group in enumerate(groups):
        if widths[number] != group.layout.width:
            yield Finding(
                kind=FaultKind.WIDTH,
                group=group.index,
                value=f"{widths[number]} columns ({derivations[number]})",
                expected=group.layout.explain(),
            )


def split_findings(
    groups: Sequence[PlannedGroup], attention_groups: Sequence[Sequence[Any]]
) -> Iterator[Finding]:
    """Yield a finding for each table of kernel blocks that is not as wide as planned.

    Args:
        groups: The groups.
        attention_groups: [groups of vLLM] the attention groups of each.
    """
    for group in groups:
        if group.index >= len(attention_groups):
            continue
        for attention_group in attention_groups[group.index]:
            size, table = attention_group.kernel_block_size, attention_group.kernel_block_table
            if size is None or table is None:
                continue
            layout = group.layout
            try:
                layout = BlockTableLayout.plan(layout.spec, layout.limits, size)
            except BlockTableError as error:
                expected = str(error)
            else:
                expected = layout.explain()
                if table.shape[-1] == layout.width:
                    continue
            yield Finding(
                kind=FaultKind.WIDTH,
                group=group.index,
                value=f"{table.shape[-1]} columns of kernel blocks of {size} tokens",
                expected=expected,
            )


def _spec_of(spec: Any, limits: ServingLimits) -> LayerSpec:
    """Return the spec that plans the same rows; raise where there is none."""
    names = {parent.__name__ for parent in type(spec).__mro__}
    if "UniformTypeKVCacheSpecs" in names:
        return _spec_of(spec.first_spec, limits)
    for name in names & _NOT_CHECKED.keys():
        raise NotCheckedError(f"{name}: {_NOT_CHECKED[name]}")
    if "MambaSpec" in names:
        return MambaSpec(
            block_size=spec.block_size,
            mode=spec.mamba_cache_mode,
            num_speculative_blocks=spec.num_speculative_blocks,
        )
    if "CircularBufferSpec" in names:
        # one block a request, which vLLM gives no slots: its kernels go round in it themselves
        return MambaSpec(block_size=spec.block_size)
    if "SlidingWindowSpec" in names:
        if spec.dcp_sharded and limits.context_parallel.size > 1:
            raise NotCheckedError(f"{type(spec).__name__}: a window is not sharded")
        return SlidingWindowSpec(
            block_size=spec.block_size,
            window=spec.sliding_window,
            extra_retained_tokens=spec.extra_retained_tokens,
            token_alignment=spec.block_table_token_alignment,
        )
    if "AttentionSpec" in names:
        return AttentionSpec(
            block_size=spec.block_size,
            sharded=spec.dcp_sharded,
            token_alignment=spec.block_table_token_alignment,
        )
    raise NotCheckedError(f"{type(spec).__name__} is a kind of cache that is not known here")
