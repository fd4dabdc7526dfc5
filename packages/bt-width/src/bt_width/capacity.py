"""The numbers a planner asks a layout for: bytes, reach, and what a pool can hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex, assert_never

from ._checks import as_index, require_instance, require_int
from .errors import InvalidSpecError, shown
from .layout import MAX_POSITION, BlockTableLayout

ID_BYTES = 4
"""Bytes of an id in a table (int32)."""

_INT32_REACH = 2**31


def row_bytes(layout: BlockTableLayout) -> int:
    """Return the bytes of one row of a group's table."""
    _require_layout(layout)
    return layout.width * ID_BYTES


def table_bytes(layout: BlockTableLayout) -> int:
    """Return the bytes of a group's table of ``max_num_reqs`` rows."""
    _require_layout(layout)
    return layout.limits.max_num_reqs * row_bytes(layout)


def tables_bytes(layouts: Iterable[BlockTableLayout]) -> int:
    """Return the bytes of the tables of all groups."""
    try:
        plans = tuple(layouts)
    except TypeError:
        raise InvalidSpecError(
            f"layouts must be iterable, not {shown(layouts)}", value=layouts
        ) from None
    return sum(table_bytes(layout) for layout in plans)


def index_buffer_bytes(layout: BlockTableLayout) -> int:
    """Return the bytes of an indexer's expanded table: one row per decode token of a step.

    A step decodes at most ``1 + num_speculative_tokens`` tokens a request, and never
    more than it may batch.
    """
    _require_layout(layout)
    limits = layout.limits
    decode_tokens = limits.max_num_reqs * (1 + limits.num_speculative_tokens)
    return min(limits.max_num_batched_tokens, decode_tokens) * row_bytes(layout)


def addressable_tokens(layout: BlockTableLayout) -> int | None:
    """Return how many tokens of a request a row can address, on all ranks together.

    Never more than there are positions with a slot, and a ring addresses them all; a
    group without slots none: None.
    """
    _require_layout(layout)
    match layout.slot_mode:
        case "block":
            tokens = layout.width * layout.kernel_block_size * layout.shards
            return min(tokens, MAX_POSITION + 1)
        case "ring":
            return MAX_POSITION + 1
        case "none":
            return None
        case _ as mode:
            assert_never(mode)


def max_addressable_blocks(elements_per_block: int) -> int:
    """Return the most blocks that a consumer with 32-bit signed offsets can address.

    A kernel that multiplies a block id by a block's elements in int32 wraps beyond
    them (vLLM #50427).

    Args:
        elements_per_block: Elements of a block in the consumer's view, keys and
            values together where one view spans both.
    """
    require_int("elements_per_block", elements_per_block, minimum=1)
    return _INT32_REACH // elements_per_block


def longest_request(
    layout: BlockTableLayout,
    num_blocks: SupportsIndex,
    *,
    max_in_flight_tokens: SupportsIndex | None = None,
) -> int:
    """Return the tokens of the longest request that a pool of ``num_blocks`` can hold.

    Block 0 is the null block, so a pool has one block less to give (vLLM #48724). The
    pool must hold the lookahead of such a request too.

    Args:
        layout: The group's plan.
        num_blocks: Blocks of the pool, block 0 included.
        max_in_flight_tokens: The most tokens of one request in the steps under way;
            ``max_num_batched_tokens`` by default.
    """
    _require_layout(layout)
    usable = as_index("num_blocks", num_blocks, minimum=1) - 1
    limits = layout.limits
    if max_in_flight_tokens is None:
        max_in_flight_tokens = limits.max_num_batched_tokens
    if usable >= layout.max_resident_blocks(max_in_flight_tokens):
        return limits.max_model_len
    held = layout._rule.count_tokens(usable)
    return max(held - limits.lookahead_tokens, 0)


def _require_layout(layout: BlockTableLayout) -> None:
    require_instance("layout", layout, BlockTableLayout, wanted="a BlockTableLayout")
