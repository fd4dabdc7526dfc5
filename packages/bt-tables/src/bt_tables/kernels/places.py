"""Where a kernel finds what the packet and the group facts say, as Triton constants."""

from __future__ import annotations

from bt_width import MAX_POSITION, NULL_BLOCK, PAD_SLOT

from .._launch import wire
from .._launch.wire import GroupFacts, Header, RecordField
from ..triton_support import tl


def _header(field: str) -> tl.constexpr:
    return tl.constexpr(Header._fields.index(field))


def _fact(field: str) -> tl.constexpr:
    return tl.constexpr(GroupFacts._fields.index(field))


NULL = tl.constexpr(NULL_BLOCK)
PAD = tl.constexpr(PAD_SLOT)
LAST_POSITION = tl.constexpr(MAX_POSITION)

NUM_GROUPS = _header("num_groups")
ENTRIES_AT = _header("entries_at")
NUM_EDITS = _header("num_edits")
NUM_ENTRIES = _header("num_entries")
REQUESTS_AT = _header("requests_at")
NUM_REQUESTS = _header("num_requests")
QUERY_START_AT = _header("query_start_at")
POSITIONS_AT = _header("positions_at")
MAX_TOKENS = _header("max_tokens")
SLOTS_END = _header("slots_end")
TOKEN_TILES = _header("token_tiles")
CHUNKS = _header("chunks")
EDIT_OF_ROW = tl.constexpr(wire.EDIT_OF_ROW_AT)

ROW = tl.constexpr(wire.ROW_AT)
BATCH_ROW = tl.constexpr(wire.BATCH_ROW_AT)
FIELDS = tl.constexpr(wire.FIELDS_AT)
NUM_FIELDS = tl.constexpr(len(RecordField))
BASE = tl.constexpr(RecordField.BASE.value)
KEEP = tl.constexpr(RecordField.KEEP.value)
BLOCKS_BEFORE = tl.constexpr(RecordField.BLOCKS_BEFORE.value)
NULLED_BEFORE = tl.constexpr(RecordField.NULLED_BEFORE.value)
BLOCKS = tl.constexpr(RecordField.BLOCKS.value)
NULLED = tl.constexpr(RecordField.NULLED.value)

GROUP_FACTS = tl.constexpr(wire.GROUP_FACTS)
TABLE_AT = _fact("table_at")
SLOTS_AT = _fact("slots_at")
WIDTH = _fact("width")
SPLIT = _fact("split")
BLOCK_SIZE = _fact("block_size")
KERNEL_BLOCK_SIZE = _fact("kernel_block_size")
SHARDS = _fact("shards")
RANK = _fact("rank")
INTERLEAVE = _fact("interleave")
ADVANCES = _fact("advances")
SLOT_BLOCKS = _fact("slot_blocks")
