"""A table row for each decode token, copied as far as it lives. N requests, T tokens, W columns."""

from __future__ import annotations

import torch

from bt_tables.triton_support import jit, tl
from bt_width import NULL_BLOCK

from ..batch.geometry import RowGeometry
from ..operations import ExpandedRows, TokenLens
from .launch import device_of, row_constants
from .tokens import local_states, request_of_token, token_len

_TILE = 512


def expand_rows(
    geometry: RowGeometry,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    lens: TokenLens,
    rows: ExpandedRows,
) -> None:
    """Launch one program per token; see ``Operations``."""
    num_reqs, num_tokens = seq_lens.numel(), lens.seq_lens.numel()
    if not num_tokens:
        return
    with device_of(rows.table):
        expand_rows_kernel[(num_tokens,)](
            query_start_loc_ptr=query_start_loc,
            seq_lens_ptr=seq_lens,
            block_table_ptr=block_table,
            block_table_row_stride=block_table.stride(0),
            out_lens_ptr=lens.seq_lens,
            out_local_lens_ptr=lens.local_lens,
            out_table_ptr=rows.table,
            out_table_row_stride=rows.table.stride(0),
            num_live_ptr=rows.num_live,
            N=num_reqs,
            W=geometry.width,
            search_steps=num_reqs.bit_length(),
            NULL_BLOCK=NULL_BLOCK,
            STATES_PER_COLUMN=geometry.states_per_column,
            **row_constants(geometry),
            TILE=_TILE,
        )


@jit(
    any_value=(
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "block_table_ptr",
        "block_table_row_stride",
        "out_lens_ptr",
        "out_local_lens_ptr",
        "out_table_ptr",
        "out_table_row_stride",
        "num_live_ptr",
        "N",
        "W",
        "search_steps",
    )
)
def expand_rows_kernel(
    query_start_loc_ptr: tl.tensor,  # [N + 1] int32
    seq_lens_ptr: tl.tensor,  # [N] int32
    block_table_ptr: tl.tensor,  # [N, W] int32
    block_table_row_stride: tl.tensor,
    out_lens_ptr: tl.tensor,  # [T] int32
    out_local_lens_ptr: tl.tensor,  # [T] int32
    out_table_ptr: tl.tensor,  # [T, W] int32
    out_table_row_stride: tl.tensor,
    num_live_ptr: tl.tensor,  # [T] int32
    N: tl.tensor,
    W: tl.tensor,
    search_steps: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    STATES_PER_COLUMN: tl.constexpr,
    TOKENS_PER_STATE: tl.constexpr,
    SHARDS: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write one token's length and row, and null what its row held before."""
    token = tl.program_id(0)
    req = request_of_token(query_start_loc_ptr, token, N, search_steps)
    length = token_len(query_start_loc_ptr, seq_lens_ptr, token, req, N)
    local = local_states(length, TOKENS_PER_STATE, SHARDS, RANK, INTERLEAVE)
    tl.store(out_lens_ptr + token, length)
    tl.store(out_local_lens_ptr + token, local)

    live = tl.minimum((local + STATES_PER_COLUMN - 1) // STATES_PER_COLUMN, W)
    reach = tl.maximum(live, tl.load(num_live_ptr + token))
    # a token without a request has no live column, so that its source is never read
    source = block_table_ptr + req.to(tl.int64) * block_table_row_stride
    target = out_table_ptr + token.to(tl.int64) * out_table_row_stride
    first = 0
    while first < reach:
        columns = first + tl.arange(0, TILE)
        ids = tl.load(source + columns, mask=columns < live, other=NULL_BLOCK)
        tl.store(target + columns, ids, mask=columns < reach)
        first += TILE
    # every thread has to know the old count before one of them overwrites it
    tl.debug_barrier()
    tl.store(num_live_ptr + token, live)
