"""Kernels that run the device's address arithmetic alone, element by element."""

from __future__ import annotations

from bt_tables.kernels.addressing import kernel_block_id, local_length, locate_local
from bt_tables.triton_support import jit, tl


@jit
def addressing_kernel(
    positions_ptr: tl.tensor,  # [size] int32
    block_ids_ptr: tl.tensor,  # [size] int32
    is_ours_ptr: tl.tensor,  # [size] int32
    local_ptr: tl.tensor,  # [size] int32
    lengths_ptr: tl.tensor,  # [size] int32
    kernel_ids_ptr: tl.tensor,  # [size] int32
    size: tl.tensor,
    shards: tl.tensor,
    rank: tl.tensor,
    interleave: tl.tensor,
    split: tl.tensor,
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    """Write what each device function says of each position, taken as a length too."""
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = index < size
    position = tl.load(positions_ptr + index, mask=mask, other=0)
    is_ours, local = locate_local(position, shards, rank, interleave)
    tl.store(is_ours_ptr + index, is_ours.to(tl.int32), mask=mask)
    tl.store(local_ptr + index, local, mask=mask)
    length = local_length(position, shards, rank, interleave)
    tl.store(lengths_ptr + index, length, mask=mask)
    block_id = tl.load(block_ids_ptr + index, mask=mask, other=0)
    kernel_id = kernel_block_id(block_id, index % split, split)
    tl.store(kernel_ids_ptr + index, kernel_id, mask=mask)
