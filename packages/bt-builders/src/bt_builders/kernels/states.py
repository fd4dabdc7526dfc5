"""Kernels over recurrent states: where they come from, where they go. N requests, W columns."""

from __future__ import annotations

import torch

from bt_tables.triton_support import jit, tl
from bt_width import NULL_BLOCK, Addressing

from ..operations import CommittedStates, MambaStates, StateBatch
from .tokens import device_of

_TILE = 128


def state_ids(addressing: Addressing, pad: int, batch: StateBatch, out: MambaStates) -> None:
    """Launch one program per tile of requests; see ``Operations``."""
    num_reqs = batch.seq_lens.numel()
    if not num_reqs:
        return
    with device_of(out.state_ids):
        state_ids_kernel[(-(-num_reqs // _TILE),)](
            block_table_ptr=batch.block_table,
            block_table_row_stride=batch.block_table.stride(0),
            num_computed_tokens_ptr=batch.num_computed_tokens,
            seq_lens_ptr=batch.seq_lens,
            num_accepted_tokens_ptr=batch.num_accepted_tokens,
            source_ids_ptr=out.source_ids,
            state_ids_ptr=out.state_ids,
            state_ids_row_stride=out.state_ids.stride(0),
            out_accepted_ptr=out.num_accepted_tokens,
            has_initial_states_ptr=out.has_initial_states,
            copies_ptr=out.copies,
            N=num_reqs,
            W=addressing.width,
            max_tokens=addressing.max_tokens,
            NULL_BLOCK=NULL_BLOCK,
            STATE_PAD=pad,
            TOKENS_PER_COLUMN=addressing.tokens_per_state_column,
            NUM_STATES=addressing.states_per_step,
            TILE=_TILE,
        )


@jit
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
    max_tokens: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    STATE_PAD: tl.constexpr,
    TOKENS_PER_COLUMN: tl.constexpr,
    NUM_STATES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write each request's source, its targets, and whether the source must be copied."""
    reqs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = reqs < N
    computed = load_count(num_computed_tokens_ptr + reqs, inside, 0, max_tokens)
    lens = load_count(seq_lens_ptr + reqs, inside, 0, max_tokens)
    accepted = load_count(num_accepted_tokens_ptr + reqs, inside, 1, NUM_STATES)
    first = state_column(lens, TOKENS_PER_COLUMN)
    read = state_column(computed, TOKENS_PER_COLUMN)
    rows = reqs.to(tl.int64)
    table = block_table_ptr + rows * block_table_row_stride

    is_live = lens > 0
    has_initial = is_live & (computed > 0)
    source = pick_state(table, read + accepted - 1, has_initial, W, NULL_BLOCK, STATE_PAD)
    tl.store(source_ids_ptr + reqs, source, mask=inside)
    for state in tl.static_range(NUM_STATES):
        target = pick_state(table, first + state, is_live, W, NULL_BLOCK, STATE_PAD)
        tl.store(state_ids_ptr + rows * state_ids_row_stride + state, target, mask=inside)
    stays = has_initial & (first == read)
    tl.store(out_accepted_ptr + reqs, tl.where(stays, accepted, 1), mask=inside)
    tl.store(has_initial_states_ptr + reqs, has_initial, mask=inside)
    tl.store(copies_ptr + reqs, has_initial & (first != read), mask=inside)


def commit_states(
    addressing: Addressing,
    pad: int,
    batch: StateBatch,
    accepted: torch.Tensor,
    out: CommittedStates,
) -> None:
    """Launch one program per tile of requests; see ``Operations``."""
    num_reqs, num_copies = out.target_ids.shape
    if not num_reqs:
        return
    with device_of(out.target_ids):
        commit_states_kernel[(-(-num_reqs // _TILE),)](
            block_table_ptr=batch.block_table,
            block_table_row_stride=batch.block_table.stride(0),
            num_computed_tokens_ptr=batch.num_computed_tokens,
            seq_lens_ptr=batch.seq_lens,
            num_accepted_before_ptr=batch.num_accepted_tokens,
            num_accepted_tokens_ptr=accepted,
            source_ids_ptr=out.source_ids,
            target_ids_ptr=out.target_ids,
            copies_row_stride=out.target_ids.stride(0),
            out_accepted_ptr=out.num_accepted_tokens,
            N=num_reqs,
            W=addressing.width,
            max_tokens=addressing.max_tokens,
            NULL_BLOCK=NULL_BLOCK,
            STATE_PAD=pad,
            TOKENS_PER_COLUMN=addressing.tokens_per_state_column,
            NUM_STATES=addressing.states_per_step,
            NUM_COPIES=num_copies,
            TILE=_TILE,
        )


@jit
def commit_states_kernel(
    block_table_ptr: tl.tensor,  # [N, W] int32
    block_table_row_stride: tl.tensor,
    num_computed_tokens_ptr: tl.tensor,  # [N] int32
    seq_lens_ptr: tl.tensor,  # [N] int32
    num_accepted_before_ptr: tl.tensor,  # [N] int32
    num_accepted_tokens_ptr: tl.tensor,  # [N] int32
    source_ids_ptr: tl.tensor,  # [N, C] int32
    target_ids_ptr: tl.tensor,  # [N, C] int32
    copies_row_stride: tl.tensor,  # of both
    out_accepted_ptr: tl.tensor,  # [N] int32
    N: tl.tensor,
    W: tl.tensor,
    max_tokens: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    STATE_PAD: tl.constexpr,
    TOKENS_PER_COLUMN: tl.constexpr,
    NUM_STATES: tl.constexpr,
    NUM_COPIES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write the copies that put each kept state into the column that later steps look in."""
    reqs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = reqs < N
    computed = load_count(num_computed_tokens_ptr + reqs, inside, 0, max_tokens)
    lens = load_count(seq_lens_ptr + reqs, inside, 0, max_tokens)
    before = load_count(num_accepted_before_ptr + reqs, inside, 1, NUM_STATES)
    accepted = load_count(num_accepted_tokens_ptr + reqs, inside, 1, NUM_STATES)
    is_live = lens > computed
    kept = tl.minimum(computed + accepted, lens)
    accepted = kept - computed
    first = state_column(lens, TOKENS_PER_COLUMN)
    last = state_column(kept, TOKENS_PER_COLUMN)
    # states that end a column after ``computed``, and the last state where it lies elsewhere
    num_ends = kept // TOKENS_PER_COLUMN - computed // TOKENS_PER_COLUMN
    ends_column = kept % TOKENS_PER_COLUMN == 0
    moves = ends_column | (first != last)
    rows = reqs.to(tl.int64)
    table = block_table_ptr + rows * block_table_row_stride
    for copy in tl.static_range(NUM_COPIES):
        column = computed // TOKENS_PER_COLUMN + copy
        is_end = copy < num_ends
        is_last = (copy == num_ends) & moves & (ends_column == 0)
        tokens = tl.where(is_end, (column + 1) * TOKENS_PER_COLUMN, kept)
        source_column = first + tokens - computed - 1
        target_column = tl.where(is_end, column, last)
        is_copied = is_live & (is_end | is_last) & (source_column != target_column)
        source = pick_state(table, source_column, is_copied, W, NULL_BLOCK, STATE_PAD)
        target = pick_state(table, target_column, is_copied, W, NULL_BLOCK, STATE_PAD)
        is_copied = (source != STATE_PAD) & (target != STATE_PAD)
        place = rows * copies_row_stride + copy
        tl.store(source_ids_ptr + place, tl.where(is_copied, source, STATE_PAD), mask=inside)
        tl.store(target_ids_ptr + place, tl.where(is_copied, target, STATE_PAD), mask=inside)
    # a request without tokens keeps its state where it was
    out = tl.where(is_live, tl.where(moves, 1, accepted), tl.where(lens > 0, before, 1))
    tl.store(out_accepted_ptr + reqs, out, mask=inside)


@jit
def load_count(
    pointer: tl.tensor,  # a tile of pointers to int32
    inside: tl.tensor,  # like pointer, int1
    least: tl.constexpr,
    most: tl.tensor,  # a scalar or a constant
) -> tl.tensor:
    """Return counts that the device knows, clamped: they lead to columns."""
    return tl.minimum(tl.maximum(tl.load(pointer, mask=inside, other=least), least), most)


@jit
def state_column(
    num_tokens: tl.tensor,  # any shape, int32
    TOKENS_PER_COLUMN: tl.constexpr,
) -> tl.tensor:
    """Return the column of the state after ``num_tokens``."""
    return tl.maximum(num_tokens - 1, 0) // TOKENS_PER_COLUMN


@jit
def pick_state(
    table: tl.tensor,  # a tile of pointers to rows
    columns: tl.tensor,  # like table, int32
    is_state: tl.tensor,  # like table, int1
    W: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    STATE_PAD: tl.constexpr,
) -> tl.tensor:
    """Return the id in each row's column, or the pad: no state, past the width, or null."""
    inside = is_state & (columns >= 0) & (columns < W)
    ids = tl.load(table + columns, mask=inside, other=NULL_BLOCK)
    return tl.where(ids == NULL_BLOCK, STATE_PAD, ids)
