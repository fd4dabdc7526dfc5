"""Where recurrent states come from and go to. N requests, S states of one, W columns."""

from __future__ import annotations

from bt_tables.triton_support import jit, tl
from bt_width import NULL_BLOCK

from ..operations import StateBatch, StateGeometry, StateRows
from .launch import device_of, state_arguments, state_constants
from .states import pick_state, state_column

_TILE = 128


def state_ids(geometry: StateGeometry, batch: StateBatch, out: StateRows) -> None:
    """Launch one program per tile of requests; see ``Operations``."""
    num_reqs = batch.seq_lens.numel()
    if not num_reqs:
        return
    with device_of(out.state_ids):
        state_ids_kernel[(-(-num_reqs // _TILE),)](
            **state_arguments(batch),
            source_ids_ptr=out.source_ids,
            state_ids_ptr=out.state_ids,
            state_ids_row_stride=out.state_ids.stride(0),
            out_accepted_ptr=out.num_accepted_tokens,
            has_initial_states_ptr=out.has_initial_states,
            copies_ptr=out.copies,
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
        "state_ids_ptr",
        "state_ids_row_stride",
        "out_accepted_ptr",
        "has_initial_states_ptr",
        "copies_ptr",
        "N",
        "W",
    )
)
def state_ids_kernel(
    block_table_ptr: tl.tensor,  # [N, W] int32
    block_table_row_stride: tl.tensor,
    num_computed_tokens_ptr: tl.tensor,  # [N] int32
    seq_lens_ptr: tl.tensor,  # [N] int32
    num_accepted_tokens_ptr: tl.tensor,  # [N] int32
    source_ids_ptr: tl.tensor,  # [N] int32
    state_ids_ptr: tl.tensor,  # [N, S] int32
    state_ids_row_stride: tl.tensor,
    out_accepted_ptr: tl.tensor,  # [N] int32
    has_initial_states_ptr: tl.tensor,  # [N] bool
    copies_ptr: tl.tensor,  # [N] bool
    N: tl.tensor,
    W: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    STATE_PAD: tl.constexpr,
    TOKENS_PER_COLUMN: tl.constexpr,
    NUM_STATES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write each request's source, its targets, and whether the source must be copied."""
    reqs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = reqs < N
    computed = tl.load(num_computed_tokens_ptr + reqs, mask=inside, other=0)
    lens = tl.load(seq_lens_ptr + reqs, mask=inside, other=0)
    accepted = tl.load(num_accepted_tokens_ptr + reqs, mask=inside, other=1)
    draft = tl.maximum(accepted - 1, 0)
    first = state_column(lens, TOKENS_PER_COLUMN)
    read = state_column(computed, TOKENS_PER_COLUMN)
    stays = first == read
    rows = reqs.to(tl.int64)

    is_live = lens > 0
    has_initial = is_live & (computed > 0)
    source = pick_state(
        block_table_ptr,
        block_table_row_stride,
        rows,
        read + draft,
        has_initial & (draft < NUM_STATES),
        W,
        NULL_BLOCK,
        STATE_PAD,
    )
    tl.store(source_ids_ptr + reqs, source, mask=inside)
    for state in tl.static_range(NUM_STATES):
        target = pick_state(
            block_table_ptr,
            block_table_row_stride,
            rows,
            first + state,
            is_live,
            W,
            NULL_BLOCK,
            STATE_PAD,
        )
        tl.store(state_ids_ptr + rows * state_ids_row_stride + state, target, mask=inside)
    tl.store(out_accepted_ptr + reqs, tl.where(has_initial & stays, draft + 1, 1), mask=inside)
    tl.store(has_initial_states_ptr + reqs, has_initial, mask=inside)
    tl.store(copies_ptr + reqs, has_initial & (first != read), mask=inside)
