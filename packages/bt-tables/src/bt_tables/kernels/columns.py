"""The columns of a step: what a row holds after the launch, and who writes it where.

Dimensions: R rows, W columns, G groups.
"""

from __future__ import annotations

from ..triton_support import jit, tl
from . import places as at


@jit()
def write_columns(
    item: tl.tensor,  # the share's number: groups first, then chunks, then entries
    packet_ptr: tl.tensor,  # int32, see wire.py
    groups_ptr: tl.tensor,  # [G, GROUP_FACTS] int64
    rows_ptr: tl.tensor,  # flat, of each group [R, W] int32
    batch_ptr: tl.tensor,  # likewise
    TILE: tl.constexpr,
) -> None:
    """Write a share of one record's columns in one group."""
    num_groups = tl.load(packet_ptr + at.NUM_GROUPS)
    chunks = tl.load(packet_ptr + at.CHUNKS)
    group = item % num_groups
    chunk = item // num_groups % chunks
    entry = item // num_groups // chunks

    facts_ptr = groups_ptr + group * at.GROUP_FACTS
    width = tl.load(facts_ptr + at.WIDTH)
    split = tl.load(facts_ptr + at.SPLIT).to(tl.int32)
    record_ptr = packet_ptr + tl.load(packet_ptr + at.ENTRIES_AT)
    record_ptr += entry * (at.FIELDS + at.NUM_FIELDS * num_groups)
    field_ptr = record_ptr + at.FIELDS + group
    base = tl.load(field_ptr + at.BASE * num_groups)
    keep = tl.load(field_ptr + at.KEEP * num_groups)
    nulled_before = tl.load(field_ptr + at.NULLED_BEFORE * num_groups)
    blocks = tl.load(field_ptr + at.BLOCKS * num_groups)
    nulled = tl.load(field_ptr + at.NULLED * num_groups)
    stop = tl.maximum(blocks, tl.load(field_ptr + at.BLOCKS_BEFORE * num_groups))

    # an edit writes the blocks it nulls, then those past what it keeps; a copy writes all
    is_edit = entry < tl.load(packet_ptr + at.NUM_EDITS)
    nulling = tl.maximum(tl.minimum(nulled, keep) - nulled_before, 0)
    nulling = tl.where(is_edit, nulling, 0) * split
    start = tl.where(is_edit, keep, 0) * split
    end = nulling + stop * split - start
    end = tl.where(entry < tl.load(packet_ptr + at.NUM_ENTRIES), end, 0)

    row = tl.load(record_ptr + at.ROW).to(tl.int64)
    batch_row = tl.load(record_ptr + at.BATCH_ROW).to(tl.int64)
    table_at = tl.load(facts_ptr + at.TABLE_AT)
    # what is nowhere looks at row 0 and touches none of it
    row_ptr = rows_ptr + table_at + tl.maximum(row, 0) * width
    batch_row_ptr = batch_ptr + table_at + tl.maximum(batch_row, 0) * width
    row_end = tl.where(is_edit, end, 0)
    batch_end = tl.where(batch_row >= 0, end, 0)

    first = chunk * TILE
    while first < end:
        index = first + tl.arange(0, TILE)
        column = tl.where(index < nulling, nulled_before * split, start - nulling) + index
        ids = ids_after(column, row_ptr, packet_ptr, split, base, keep, blocks, nulled, index < end)
        tl.store(row_ptr + column, ids, mask=index < row_end)
        tl.store(batch_row_ptr + column, ids, mask=index < batch_end)
        first += chunks * TILE


@jit()
def ids_after(
    column: tl.tensor,  # [tile]
    row_ptr: tl.tensor,  # the row of each, or of all
    packet_ptr: tl.tensor,
    split: tl.tensor,
    base: tl.tensor,  # of each or of all, as are the next three; see RecordField
    keep: tl.tensor,
    blocks: tl.tensor,
    nulled: tl.tensor,
    mask: tl.tensor,  # [tile], where anything is asked
) -> tl.tensor:
    """Return what rows hold in columns after the launch; the null block outside ``mask``."""
    block = column // split
    is_live = mask & (block >= nulled)
    is_fresh = is_live & (block >= keep) & (block < blocks)
    old = tl.load(row_ptr + column, mask=is_live & (block < keep), other=at.NULL)
    fresh = tl.load(packet_ptr + base + block, mask=is_fresh, other=at.NULL)
    return tl.where(fresh == at.NULL, old, fresh * split + column % split)
