"""What kernels share of recurrent states: the column of one, and its id. N requests, W columns."""

from __future__ import annotations

from bt_tables.triton_support import jit, tl


@jit()
def pick_state(
    block_table_ptr: tl.tensor,  # [N, W] int32
    block_table_row_stride: tl.tensor,
    rows: tl.tensor,  # a tile, int64
    columns: tl.tensor,  # like rows, int32
    is_state: tl.tensor,  # like rows, int1
    W: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    STATE_PAD: tl.constexpr,
) -> tl.tensor:
    """Return the id in each row's column, or the pad: no state, past the width, or null."""
    # a sum of counts that nobody has may have wrapped
    inside = is_state & (columns >= 0) & (columns < W)
    ids = tl.load(
        block_table_ptr + rows * block_table_row_stride + columns, mask=inside, other=NULL_BLOCK
    )
    return tl.where(ids == NULL_BLOCK, STATE_PAD, ids)


@jit()
def state_column(
    num_tokens: tl.tensor,  # any shape, int32
    TOKENS_PER_COLUMN: tl.constexpr,
) -> tl.tensor:
    """Return the column of the state after ``num_tokens``; the first where one is kept."""
    column = num_tokens * 0
    if TOKENS_PER_COLUMN > 0:
        column = tl.maximum(num_tokens - 1, 0) // TOKENS_PER_COLUMN
    return column
