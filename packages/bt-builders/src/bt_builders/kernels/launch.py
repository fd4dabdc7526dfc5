"""What launches share: their device made the current one, and numbers by the kernels' names."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ..batch.geometry import RowGeometry
from ..operations import StateBatch, StateGeometry


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which the device of ``tensor`` is the current one; on a CPU, none.

    Triton launches on the current device, whatever the tensors'.
    """
    context: AbstractContextManager[object] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return context


def row_constants(geometry: RowGeometry) -> dict[str, int]:
    """Return how a length is spread over states and ranks, in the order of every signature."""
    return {
        "TOKENS_PER_STATE": geometry.tokens_per_state,
        "SHARDS": geometry.shards,
        "RANK": geometry.rank,
        "INTERLEAVE": geometry.interleave,
    }


def state_arguments(batch: StateBatch) -> dict[str, torch.Tensor | int]:
    """Return what both kernels of recurrent states read, in the order of their signatures."""
    return {
        "block_table_ptr": batch.block_table,
        "block_table_row_stride": batch.block_table.stride(0),
        "num_computed_tokens_ptr": batch.num_computed_tokens,
        "seq_lens_ptr": batch.seq_lens,
        "num_accepted_tokens_ptr": batch.num_accepted_tokens,
    }


def state_constants(geometry: StateGeometry) -> dict[str, int]:
    """Return how recurrent states lie in a row, in the order of both signatures."""
    return {
        "STATE_PAD": geometry.pad,
        "TOKENS_PER_COLUMN": geometry.tokens_per_column,
        "NUM_STATES": geometry.num_states,
    }
