"""One row of one group: its numbers, its columns, and a claim on each of its blocks.

R rows, N requests, W columns, B blocks of all pools.
"""

from __future__ import annotations

from ...triton_support import jit, tl
from .owner_check import claim_blocks
from .plan_line import (
    COLUMNS_OF_LINE,
    INTERLEAVE,
    KEEPS_STATE,
    KERNEL_BLOCK_SIZE,
    MAX_TOKENS,
    NULL,
    NUM_BLOCKS,
    RANK,
    SHARDS,
    SPLIT,
    STATES,
    TABLE,
    TABLE_ROW_STRIDE,
    TABLE_ROWS,
    TOKENS_PER_STATE,
    VISIBLE_TOKENS,
    WIDTH,
)


@jit()
def check_row(
    plan_ptr: tl.tensor,  # [NUM_FIELDS] int64
    seq_lens_ptr: tl.tensor,  # [N]
    starts_ptr: tl.tensor,  # [num_starts]
    num_blocks_ptr: tl.tensor,  # the row's
    mark_ptr: tl.tensor,  # the row's, int32
    claims_ptr: tl.tensor,  # [B] int64
    row: tl.tensor,
    num_reqs: tl.tensor,
    num_starts: tl.tensor,
    num_slots: tl.tensor,
    launch: tl.tensor,
    HAS_REFS: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
) -> tl.tensor:
    """Return whether the row's numbers, its columns and its owners are at fault, 0 where not."""
    width, split = tl.load(plan_ptr + WIDTH), tl.load(plan_ptr + SPLIT)
    max_tokens = tl.load(plan_ptr + MAX_TOKENS)
    is_request = row < num_reqs
    start = tl.load(starts_ptr + row, mask=row < num_starts, other=0).to(tl.int64)
    end = tl.load(starts_ptr + row + 1, mask=row + 1 < num_starts, other=0).to(tl.int64)
    total = tl.load(starts_ptr + num_reqs).to(tl.int64)
    length = tl.load(seq_lens_ptr + row, mask=is_request, other=0).to(tl.int64)
    blocks = tl.load(num_blocks_ptr, mask=is_request, other=0).to(tl.int64)
    query = tl.where(is_request, end - start, 0)
    bad_row = (length < query) | (length > max_tokens)
    bad_row |= (row + 1 < num_starts) & (end < start)
    bad_row |= (row == 0) & ((start != 0) | (total > num_slots))
    bad_row |= (blocks < 0) | (blocks > width // split)

    computed = length - query
    length = tl.minimum(tl.maximum(length, 0), max_tokens)
    computed = tl.minimum(tl.maximum(computed, 0), length)
    live = tl.minimum(tl.maximum(blocks, 0), width // split) * split
    read_from, read_to, write_from, write_to = _reach(plan_ptr, computed, length)
    reach_end = tl.maximum(read_to, write_to)
    bad_row |= (reach_end + split - 1) // split > tl.maximum(blocks, 0)

    has_row = row < tl.load(plan_ptr + TABLE_ROWS)
    mark = tl.load(mark_ptr, mask=has_row, other=0).to(tl.int64)
    scanned = tl.minimum((tl.maximum(live, mark) // COLUMNS_OF_LINE + 1) * COLUMNS_OF_LINE, width)
    scanned = tl.where(has_row, scanned, 0)
    table = tl.load(plan_ptr + TABLE).to(tl.pointer_type(tl.int32))
    table += row.to(tl.int64) * tl.load(plan_ptr + TABLE_ROW_STRIDE)
    bad_columns, bad_owners = _scan(
        plan_ptr,
        claims_ptr,
        table,
        live,
        scanned,
        read_from,
        read_to,
        write_from,
        write_to,
        launch,
        HAS_REFS,
        COLUMN_TILE,
    )
    tl.store(mark_ptr, live.to(tl.int32), mask=has_row)
    return bad_row, bad_columns, bad_owners


@jit()
def _scan(
    plan_ptr: tl.tensor,
    claims_ptr: tl.tensor,  # [B] int64
    table: tl.tensor,  # the row's columns
    live: tl.tensor,
    scanned: tl.tensor,
    read_from: tl.tensor,
    read_to: tl.tensor,
    write_from: tl.tensor,
    write_to: tl.tensor,
    launch: tl.tensor,
    HAS_REFS: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
) -> tl.tensor:
    """Return whether a column, or a block's owners, are at fault in the columns of a row."""
    split = tl.load(plan_ptr + SPLIT)
    # an empty range touches no block, wherever it lies
    written_to = tl.where(write_from < write_to, write_to, 0)
    bad_columns, bad_owners = 0, 0
    first_column = tl.zeros((), tl.int64)
    while first_column < scanned:
        column = first_column + tl.arange(0, COLUMN_TILE)
        is_live, is_scanned = column < live, column < scanned
        ids = tl.load(table + column, mask=is_scanned, other=0).to(tl.int64)
        heads = tl.load(table + column - column % split, mask=is_scanned, other=0).to(tl.int64)
        is_touched = (column >= read_from) & (column < read_to)
        is_written = (column >= write_from) & (column < write_to)
        bad = _bad_columns(plan_ptr, column, ids, heads, is_live, is_touched | is_written)
        bad_columns = tl.maximum(bad_columns, tl.max(bad.to(tl.int32), 0))
        is_written = (column + split > write_from) & (column < written_to)
        is_head = is_live & (column % split == 0)
        bad = claim_blocks(plan_ptr, claims_ptr, ids, is_head, is_written, launch, HAS_REFS)
        bad_owners = tl.maximum(bad_owners, tl.max(bad.to(tl.int32), 0))
        first_column += COLUMN_TILE
    return bad_columns, bad_owners


@jit()
def _reach(plan_ptr: tl.tensor, computed: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Return the columns that are read and written: two half-open ranges."""
    if tl.load(plan_ptr + KEEPS_STATE) != 0:
        tokens = tl.load(plan_ptr + TOKENS_PER_STATE)
        read_from = tl.maximum(computed - 1, 0) // tokens
        read_to = read_from + (computed > 0)
        write_from = tl.maximum(length - 1, 0) // tokens
        write_to = write_from + (length > computed) * tl.load(plan_ptr + STATES)
    else:
        size = tl.load(plan_ptr + KERNEL_BLOCK_SIZE)
        before, after = _local_length(plan_ptr, computed), _local_length(plan_ptr, length)
        read_to = (after + size - 1) // size
        read_from = tl.maximum(computed - tl.load(plan_ptr + VISIBLE_TOKENS), 0) // size
        read_from = tl.minimum(read_from, read_to)
        write_from = tl.minimum(before // size, read_to)
        write_to = tl.where(after > before, read_to, write_from)
    return read_from, read_to, write_from, write_to


@jit()
def _local_length(plan_ptr: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Return how many of a request's first tokens this rank keeps."""
    interleave = tl.load(plan_ptr + INTERLEAVE)
    turn = tl.load(plan_ptr + SHARDS) * interleave
    rest = length % turn - tl.load(plan_ptr + RANK) * interleave
    return length // turn * interleave + tl.minimum(tl.maximum(rest, 0), interleave)


@jit()
def _bad_columns(
    plan_ptr: tl.tensor,
    column: tl.tensor,
    ids: tl.tensor,
    heads: tl.tensor,  # what the first column of the block holds
    is_live: tl.tensor,
    is_touched: tl.tensor,
) -> tl.tensor:
    """Return where a column is not what it must be on its own."""
    split = tl.load(plan_ptr + SPLIT)
    is_id = (ids >= split) & (ids < tl.load(plan_ptr + NUM_BLOCKS) * split)
    block = heads // split
    whole = tl.where(block == 0, 0, block * split + column % split)
    bad_live = (ids != NULL) & (~is_id | (ids != whole))
    bad_live |= (ids == NULL) & (is_touched | (whole != NULL))
    return tl.where(is_live, bad_live, ids != NULL)
