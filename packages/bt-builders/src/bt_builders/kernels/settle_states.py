"""Which state a decode copies once its accepted tokens are known. N requests, W columns."""

from __future__ import annotations

from bt_tables.triton_support import jit, tl
from bt_width import NULL_BLOCK

from ..operations import SettledRows, StateBatch, StateGeometry
from .launch import device_of, state_arguments, state_constants
from .states import pick_state, state_column

_TILE = 128


def settle_states(geometry: StateGeometry, batch: StateBatch, out: SettledRows) -> None:
    """Launch one program per tile of requests; see ``Operations``."""
    num_reqs = batch.seq_lens.numel()
    if not num_reqs:
        return
    with device_of(out.target_ids):
        settle_states_kernel[(-(-num_reqs // _TILE),)](
            **state_arguments(batch),
            source_ids_ptr=out.source_ids,
            target_ids_ptr=out.target_ids,
            out_accepted_ptr=out.num_accepted_tokens,
            N=num_reqs,
            W=geometry.width,
            NULL_BLOCK=NULL_BLOCK,
            **state_constants(geometry),
            TILE=_TILE,
        )


@jit(
    any_value=(
        "block_table_ptr",
        "block_table_row_stride",
        "num_computed_tokens_ptr",
        "seq_lens_ptr",
        "num_accepted_tokens_ptr",
        "source_ids_ptr",
        "target_ids_ptr",
        "out_accepted_ptr",
        "N",
        "W",
    )
)
def settle_states_kernel(
    block_table_ptr: tl.tensor,  # [N, W] int32
    block_table_row_stride: tl.tensor,
    num_computed_tokens_ptr: tl.tensor,  # [N] int32
    seq_lens_ptr: tl.tensor,  # [N] int32
    num_accepted_tokens_ptr: tl.tensor,  # [N] int32
    source_ids_ptr: tl.tensor,  # [N] int32
    target_ids_ptr: tl.tensor,  # [N] int32
    out_accepted_ptr: tl.tensor,  # [N] int32
    N: tl.tensor,
    W: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    STATE_PAD: tl.constexpr,
    TOKENS_PER_COLUMN: tl.constexpr,
    NUM_STATES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write the copy that keeps each request's state where the next step looks for it."""
    reqs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = reqs < N
    computed = tl.load(num_computed_tokens_ptr + reqs, mask=inside, other=0)
    lens = tl.load(seq_lens_ptr + reqs, mask=inside, other=0)
    accepted = tl.load(num_accepted_tokens_ptr + reqs, mask=inside, other=1)
    accepted = tl.maximum(accepted, 1)
    first = state_column(lens, TOKENS_PER_COLUMN)
    # the last of the tokens that stay whose state does not belong to the column written to
    kept = tl.minimum(computed + accepted, first * TOKENS_PER_COLUMN)
    draft = kept - computed - 1
    is_copied = (lens > 0) & (draft >= 0) & (draft < NUM_STATES)
    rows = reqs.to(tl.int64)
    source = pick_state(
        block_table_ptr,
        block_table_row_stride,
        rows,
        first + draft,
        is_copied,
        W,
        NULL_BLOCK,
        STATE_PAD,
    )
    target = pick_state(
        block_table_ptr,
        block_table_row_stride,
        rows,
        state_column(kept, TOKENS_PER_COLUMN),
        is_copied,
        W,
        NULL_BLOCK,
        STATE_PAD,
    )
    tl.store(source_ids_ptr + reqs, source, mask=inside)
    tl.store(target_ids_ptr + reqs, target, mask=inside)
    lies_before = is_copied & (computed + accepted == kept)
    tl.store(out_accepted_ptr + reqs, tl.where(lies_before | (lens == 0), 1, accepted), mask=inside)
