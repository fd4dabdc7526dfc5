"""A batch's tables as compressed rows: each request's ids, or slots, one after the other."""

from __future__ import annotations

import torch

from bt_width import NULL_BLOCK, PAD_SLOT

from ..triton_support import jit, tl

NULL = tl.constexpr(NULL_BLOCK)
PAD = tl.constexpr(PAD_SLOT)

_TILE = 512


def gather_csr(
    table: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    num_indices: int,
    tokens_per_column: int,
) -> None:
    """Fill ``indices`` with the ids of each request, or with the slots of its tokens.

    Args:
        table: The batch's table, [N, W] int32.
        indptr: Where each request's elements start, and the end of the last, [N + 1] int32.
        indices: Flat: int32 for ids, int64 for slots; what follows the last request's is
            left alone.
        num_indices: Elements of all requests.
        tokens_per_column: Tokens of a kernel block for slots, 0 for ids.
    """
    gather_csr_kernel[(-(-num_indices // _TILE),)](
        table_ptr=table,
        table_row_stride=table.stride(0),
        indptr_ptr=indptr,
        indices_ptr=indices,
        num_requests=table.shape[0],
        num_indices=num_indices,
        search_steps=table.shape[0].bit_length(),
        tokens_per_column=tokens_per_column,
        TILE=_TILE,
    )


@jit
def gather_csr_kernel(
    table_ptr: tl.tensor,  # [N, W] int32
    table_row_stride: tl.tensor,
    indptr_ptr: tl.tensor,  # [N + 1] int32
    indices_ptr: tl.tensor,  # [num_indices] int32, or int64 where they are slots
    num_requests: tl.tensor,
    num_indices: tl.tensor,
    search_steps: tl.tensor,
    tokens_per_column: tl.tensor,  # 0 where the indices are ids
    TILE: tl.constexpr,
) -> None:
    """Gather one tile of the output."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = place < num_indices
    # the last request that starts at or before the place; empty ones start where it ends
    low = tl.zeros_like(place)
    high = low + num_requests - 1
    step = 0
    while step < search_steps:
        middle = (low + high + 1) // 2
        start = tl.load(indptr_ptr + middle, mask=mask, other=0)
        low = tl.where(start <= place, middle, low)
        high = tl.where(start <= place, high, middle - 1)
        step += 1
    in_request = place - tl.load(indptr_ptr + low, mask=mask, other=0)
    per_column = tl.maximum(tokens_per_column, 1)
    row_ptr = table_ptr + low.to(tl.int64) * table_row_stride
    ids = tl.load(row_ptr + in_request // per_column, mask=mask, other=NULL).to(tl.int64)
    slots = tl.where(ids == NULL, PAD, ids * per_column + in_request % per_column)
    values = tl.where(tokens_per_column > 0, slots, ids)
    tl.store(indices_ptr + place, values, mask=mask)
