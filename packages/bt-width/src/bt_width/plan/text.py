"""A plan as text: groups, pools, derivations and warnings."""

from __future__ import annotations

from collections.abc import Sequence

from ..capacity import addressable_tokens, index_buffer_bytes, table_bytes
from ..errors import counted
from ..models.formats import FORMATS
from ..models.model import ModelCaches
from ..terminal import format_table
from .memory import Capacity
from .planned import PlannedGroup
from .sizes import show_bytes


def show_groups(planned: Sequence[PlannedGroup]) -> str:
    """Return the table of groups that were given as ``--group``."""
    header = ("kind", "block", "kernel block", "blocks", "width")
    return format_table(
        (*header, "tokens/row", "table bytes"),
        [
            (
                group.layout.kind,
                *_numbers(
                    group.layout.block_size,
                    group.layout.kernel_block_size,
                    group.layout.max_num_blocks,
                    group.layout.width,
                    addressable_tokens(group.layout) or 0,
                    table_bytes(group.layout),
                ),
            )
            for group in planned
        ],
    )


def show_model(model: ModelCaches, planned: Sequence[PlannedGroup], *, ranks: str) -> str:
    """Return a model's groups, and the bytes of their tables."""
    dtypes = sorted({group.group.cache_dtype or "" for group in planned if group.group} - {""})
    limits = planned[0].layout.limits
    title = (
        f"{model.model_type}, {counted(len(model.layers), 'layer')}, "
        f"cache in {' and '.join(dtypes) or '-'}, "
        f"requests of up to {counted(limits.max_model_len, 'token', mark=',')}{ranks}"
    )
    header = ("group", "layers", "block", "kernel", "blocks/req", "width")
    table = format_table(
        (*header, "bytes/token", "bytes/state"),
        [
            (
                group.name,
                *_numbers(
                    group.group.num_layers,
                    group.layout.block_size,
                    group.layout.kernel_block_size,
                    group.layout.max_num_blocks,
                    group.layout.width,
                    group.group.token_bytes,
                    group.group.state_bytes,
                ),
            )
            for group in planned
            if group.group is not None
        ],
    )
    lines = [
        f"table of {group.name}: {table_bytes(group.layout):,} bytes"
        + (
            f", and {group.index_buffer_bytes:,} of its indexer's expanded table"
            if group.index_buffer_bytes
            else ""
        )
        for group in planned
    ]
    return "\n".join([title, "", table, "", *lines])


def show_capacity(capacity: Capacity) -> str:
    """Return the pools that fit into the memory, and what they hold."""
    table = format_table(
        ("pool", "blocks", "bytes/block", "bytes", "blocks/request"),
        [
            (
                pool.name,
                *_numbers(
                    pool.num_blocks,
                    pool.block_bytes,
                    pool.num_blocks * pool.block_bytes,
                    pool.blocks_per_request,
                ),
            )
            for pool in capacity.pools
        ],
    )
    return "\n".join(
        [
            table,
            "",
            f"memory for caches   {show_bytes(capacity.memory)} on each GPU",
            f"longest request     {capacity.longest:,} tokens, alone",
            f"requests at once    {capacity.num_requests:,} of {capacity.at_len:,} tokens",
            f"limited by          {capacity.limited_by}",
        ]
    )


def explain_model(model: ModelCaches, planned: Sequence[PlannedGroup]) -> str:
    """Return how each number came about."""
    lines = []
    for planned_group in planned:
        group = planned_group.group
        lines.append(f"{planned_group.name}: {planned_group.layout.explain()}")
        if group is None:
            continue
        for member in group.members:
            if member.token_bytes:
                lines.append(
                    f"  {member.name}: {counted(member.num_layers, 'layer')}, "
                    f"{member.token_bytes // member.num_layers:,} bytes each, "
                    f"{member.token_bytes:,} per token"
                )
            else:
                lines.append(
                    f"  {member.name}: {counted(member.num_layers, 'layer')}, "
                    f"{member.recurrent_bytes:,} bytes of recurrent "
                    f"state and {member.conv_bytes:,} of convolution per state"
                )
        if group.name == "mamba":
            held = planned_group.layout.max_resident_blocks(0)
            num_bytes = held * group.state_bytes
            lines.append(f"  a request keeps {counted(held, 'state')}, {num_bytes:,} bytes")
        elif group.cache_dtype is not None and group.cache_dtype in FORMATS:
            stored = FORMATS[group.cache_dtype]
            lines.append(f"  {stored.name}: {stored.layout} ({stored.source})")
    limits = planned[0].layout.limits
    drafts = len(model.draft_layers)
    if limits.num_speculative_tokens and not drafts:
        lines.append("drafts: the config names no draft layers, so none keeps a cache here")
    elif limits.num_speculative_tokens:
        lines.append(f"drafts: {drafts} draft layers of the config are counted")
    elif drafts:
        lines.append(f"drafts: off, so {drafts} draft layers of the config are not counted")
    return "\n".join(lines)


def large_buffers(planned: Sequence[PlannedGroup]) -> list[str]:
    """Return a warning for each table and index buffer of more than a GiB."""
    warnings = []
    for group in planned:
        sizes = {"table": table_bytes(group.layout)}
        if group.group is None:
            if group.layout.kind == "attention":
                sizes["index buffer of a DSA indexer"] = index_buffer_bytes(group.layout)
        elif group.index_buffer_bytes:
            sizes["index buffer of the indexer"] = group.index_buffer_bytes
        warnings += [
            f"{group.name}: the {what} takes {size / 2**30:.2f} GiB; lower --max-num-seqs or "
            "--max-model-len, or use a larger block"
            for what, size in sizes.items()
            if size > 2**30
        ]
    return warnings


def _numbers(*numbers: int) -> list[str]:
    return [f"{number:,}" if number else "-" for number in numbers]
