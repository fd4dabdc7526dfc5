"""The derivation of a width as one paragraph, for people who read an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import counted

if TYPE_CHECKING:
    from .layout import BlockTableLayout


def explain_width(layout: BlockTableLayout) -> str:
    """Return the steps from ``max_model_len`` to the width, with every number."""
    parts = [_blocks(layout), _alignment(layout), _split(layout)]
    return ", ".join(parts)


def _blocks(layout: BlockTableLayout) -> str:
    rule = layout._rule
    total = counted(layout.max_num_blocks, "block")
    extra = f" + {rule.extra_blocks} speculative" if rule.extra_blocks else ""
    if not rule.grows:
        return f"1 block per request{extra} = {total}"
    limits = layout.limits
    length = f"max_model_len {limits.max_model_len}"
    if limits.lookahead_tokens:
        length = f"({length} + lookahead {limits.lookahead_tokens})"
    shards = counted(layout.shards, "shard")
    return f"{length} / (block {layout.block_size} x {shards}){extra} = {total}"


def _alignment(layout: BlockTableLayout) -> str:
    alignment = layout._rule.token_alignment
    if alignment is None:
        return "not rounded, as the group asks for no alignment"
    aligned = layout.blocks_per_row
    if aligned == layout.max_num_blocks:
        return f"which span a multiple of {alignment} tokens as they are"
    return f"rounded up to {aligned} so that a row spans a multiple of {alignment} tokens"


def _split(layout: BlockTableLayout) -> str:
    kernel_blocks = counted(layout.kernel_blocks_per_block, "kernel block")
    return f"x {kernel_blocks} = {counted(layout.width, 'column')}"
