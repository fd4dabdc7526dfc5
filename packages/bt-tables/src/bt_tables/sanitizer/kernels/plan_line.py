"""What a launch loads of each checked group: one line of integers, and the places in it."""

from __future__ import annotations

from typing import NamedTuple

from bt_width import MAX_POSITION, NULL_BLOCK, PAD_SLOT

from ...triton_support import tl
from ..plans import LINE, GroupPlan
from ..step import GroupStep


class PlanLine(NamedTuple):
    """What a launch needs to know of a checked group, before the fields of its plan."""

    group: int
    table_address: int
    table_row_stride: int
    table_rows: int
    slots_address: int
    num_slots: int
    refs_address: int
    claims_at: int

    @classmethod
    def of(cls, group: GroupStep, claims_at: int) -> PlanLine:
        """Read a group's tensors; the launch must come before they are freed."""
        return cls(
            group=group.group,
            table_address=group.table.data_ptr(),
            table_row_stride=group.table.stride(0),
            table_rows=group.table.shape[0],
            slots_address=group.slots.data_ptr(),
            num_slots=group.slots.shape[0],
            refs_address=0 if group.ref_counts is None else group.ref_counts.data_ptr(),
            claims_at=claims_at,
        )


_FIELDS = PlanLine._fields + GroupPlan._fields
NUM_FIELDS = tl.constexpr(len(_FIELDS))
GROUP = tl.constexpr(_FIELDS.index("group"))
TABLE = tl.constexpr(_FIELDS.index("table_address"))
TABLE_ROW_STRIDE = tl.constexpr(_FIELDS.index("table_row_stride"))
TABLE_ROWS = tl.constexpr(_FIELDS.index("table_rows"))
SLOTS = tl.constexpr(_FIELDS.index("slots_address"))
NUM_SLOTS = tl.constexpr(_FIELDS.index("num_slots"))
REFS = tl.constexpr(_FIELDS.index("refs_address"))
CLAIMS_AT = tl.constexpr(_FIELDS.index("claims_at"))
WIDTH = tl.constexpr(_FIELDS.index("width"))
SPLIT = tl.constexpr(_FIELDS.index("split"))
KERNEL_BLOCK_SIZE = tl.constexpr(_FIELDS.index("kernel_block_size"))
SHARDS = tl.constexpr(_FIELDS.index("shards"))
INTERLEAVE = tl.constexpr(_FIELDS.index("interleave"))
RANK = tl.constexpr(_FIELDS.index("rank"))
KEEPS_STATE = tl.constexpr(_FIELDS.index("keeps_state"))
HAS_SLOTS = tl.constexpr(_FIELDS.index("has_slots"))
VISIBLE_TOKENS = tl.constexpr(_FIELDS.index("visible_tokens"))
TOKENS_PER_STATE = tl.constexpr(_FIELDS.index("tokens_per_state"))
STATES = tl.constexpr(_FIELDS.index("states"))
NUM_BLOCKS = tl.constexpr(_FIELDS.index("num_blocks"))
MAX_TOKENS = tl.constexpr(_FIELDS.index("max_tokens"))
COLUMNS_OF_LINE = tl.constexpr(LINE)
NULL = tl.constexpr(NULL_BLOCK)
PAD = tl.constexpr(PAD_SLOT)
LAST_POSITION = tl.constexpr(MAX_POSITION)
