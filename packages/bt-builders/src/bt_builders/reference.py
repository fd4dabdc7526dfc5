"""The builders' device work in NumPy: the truth for the kernels, and the CPU's way."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from bt_width import NULL_BLOCK, PAD_SLOT

from .batch.geometry import RowGeometry
from .operations import (
    DraftRows,
    ExpandedRows,
    SettledRows,
    StateBatch,
    StateGeometry,
    StateRows,
    TokenLens,
)

_Ints: TypeAlias = NDArray[np.integer[Any]]


def token_lens(
    geometry: RowGeometry,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out: TokenLens,
) -> None:
    """Write what each token sees; see ``Operations``."""
    _write_token_lens(geometry, query_start_loc.numpy(), seq_lens.numpy(), out)


def expand_rows(
    geometry: RowGeometry,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    lens: TokenLens,
    rows: ExpandedRows,
) -> None:
    """Write what each token sees, and its copy of a row; see ``Operations``."""
    req_of_token = _write_token_lens(geometry, query_start_loc.numpy(), seq_lens.numpy(), lens)
    num_live = -(-lens.local_lens.numpy() // geometry.states_per_column)
    np.minimum(num_live, geometry.width, out=num_live)
    was_live = rows.num_live.numpy()
    reach = int(max(num_live.max(initial=0), was_live.max(initial=0)))
    if reach:
        columns = np.arange(reach)
        is_live = columns < num_live[:, None]
        ids = block_table.numpy()[req_of_token, :reach]
        target = rows.table.numpy()[:, :reach]
        is_written = is_live | (columns < was_live[:, None])
        np.copyto(target, np.where(is_live, ids, NULL_BLOCK), where=is_written)
    was_live[:] = num_live


def _write_token_lens(
    geometry: RowGeometry, starts: _Ints, seq_lens: _Ints, out: TokenLens
) -> _Ints:
    """Write the lengths; return each token's request, the last one for padding tokens."""
    tokens = np.arange(out.seq_lens.numel(), dtype=np.int32)
    if not seq_lens.size:
        out.seq_lens.zero_()
        out.local_lens.zero_()
        return tokens
    ends = starts[1:]
    req_of_token = ends.searchsorted(tokens, side="right")
    is_real = req_of_token < seq_lens.size
    req_of_token = np.minimum(req_of_token, seq_lens.size - 1)
    lens = np.where(is_real, seq_lens[req_of_token] - ends[req_of_token] + tokens + 1, 0)
    np.maximum(lens, 0, out=lens)
    out.seq_lens.numpy()[:] = lens
    out.local_lens.numpy()[:] = _local_states(geometry, lens)
    return req_of_token


def compress_slots(
    geometry: RowGeometry,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the slot of the state that each token completes; see ``Operations``."""
    out.numpy()[:] = _state_slots(geometry, positions.numpy(), slot_mapping.numpy())


def step_drafts(
    geometry: RowGeometry, block_table: torch.Tensor, drafts: DraftRows, step: int
) -> None:
    """Move drafts on; see ``Operations``."""
    old = drafts.seq_lens.numpy().astype(np.int64)
    moved = np.where(old > 0, old + step, 0)
    lens = np.minimum(moved, geometry.max_len)
    positions = lens - 1
    slots = _token_slots(geometry, positions, block_table.numpy())
    slots[moved > geometry.max_len] = PAD_SLOT
    drafts.seq_lens.numpy()[:] = lens
    drafts.local_lens.numpy()[:] = _local_states(geometry, lens)
    drafts.positions.numpy()[:] = positions
    drafts.slot_mapping.numpy()[:] = _state_slots(geometry, positions, slots)


def state_ids(geometry: StateGeometry, batch: StateBatch, out: StateRows) -> None:
    """Write where each request's state comes from and goes to; see ``Operations``."""
    computed = batch.num_computed_tokens.numpy()
    lens = batch.seq_lens.numpy()
    draft = np.clip(batch.num_accepted_tokens.numpy() - 1, 0, None)
    first = _state_columns(geometry, lens)
    read = _state_columns(geometry, computed)
    stays = first == read
    table = batch.block_table.numpy()

    has_initial = (lens > 0) & (computed > 0)
    is_source = has_initial & (draft < geometry.num_states)
    out.source_ids.numpy()[:] = _pick_states(geometry, table, read + draft, is_source)
    for state in range(geometry.num_states):
        column = out.state_ids.numpy()[:, state]
        column[:] = _pick_states(geometry, table, first + state, lens > 0)
    out.num_accepted_tokens.numpy()[:] = np.where(has_initial & stays, draft + 1, 1)
    out.has_initial_states.numpy()[:] = has_initial
    out.copies.numpy()[:] = has_initial & ~stays


def settle_states(geometry: StateGeometry, batch: StateBatch, out: SettledRows) -> None:
    """Write which state each decode has to copy; see ``Operations``."""
    computed = batch.num_computed_tokens.numpy()
    accepted = np.maximum(batch.num_accepted_tokens.numpy(), 1)
    lens = batch.seq_lens.numpy()
    table = batch.block_table.numpy()
    first = _state_columns(geometry, lens)
    # the last of the tokens that stay whose state does not belong to the column written to
    kept = np.minimum(computed + accepted, first * geometry.tokens_per_column)
    draft = kept - computed - 1
    is_copied = (lens > 0) & (draft >= 0) & (draft < geometry.num_states)
    out.source_ids.numpy()[:] = _pick_states(geometry, table, first + draft, is_copied)
    target = _state_columns(geometry, kept)
    out.target_ids.numpy()[:] = _pick_states(geometry, table, target, is_copied)
    lies_before = is_copied & (computed + accepted == kept)
    out.num_accepted_tokens.numpy()[:] = np.where(lies_before | (lens == 0), 1, accepted)


def _state_columns(geometry: StateGeometry, num_tokens: _Ints) -> _Ints:
    """Return the column of each state after ``num_tokens``; the first where one is kept."""
    if not geometry.tokens_per_column:
        return np.zeros_like(num_tokens)
    return np.maximum(num_tokens - 1, 0) // geometry.tokens_per_column


def _pick_states(
    geometry: StateGeometry, table: _Ints, columns: _Ints, is_state: NDArray[np.bool_]
) -> _Ints:
    """Return the id in each row's column, or the pad: no state, past the width, or null."""
    inside = is_state & (columns >= 0) & (columns < geometry.width)
    rows = np.arange(columns.size)
    ids = np.where(inside, table[rows, np.where(inside, columns, 0)], NULL_BLOCK)
    states: _Ints = np.where(ids == NULL_BLOCK, geometry.pad, ids)
    return states


def _local_states(geometry: RowGeometry, lens: _Ints) -> _Ints:
    """Return the states of ``lens`` tokens that this rank keeps."""
    turns, rest = np.divmod(lens, geometry.tokens_per_turn)
    own = np.clip(rest - geometry.rank * geometry.interleave, 0, geometry.interleave)
    states: _Ints = (turns * geometry.interleave + own) // geometry.tokens_per_state
    return states


def _token_slots(geometry: RowGeometry, positions: _Ints, table: _Ints) -> NDArray[np.int64]:
    """Return the token's slot of one position a row; ``PAD_SLOT`` where this rank has none."""
    places = np.maximum(positions, 0)
    if geometry.ring_size:
        local, is_own = places % geometry.ring_size, positions >= 0
    else:
        turns, rest = np.divmod(places, geometry.tokens_per_turn)
        owner, within = np.divmod(rest, geometry.interleave)
        local = turns * geometry.interleave + within
        is_own = (positions >= 0) & (owner == geometry.rank)
    columns, offsets = np.divmod(local, geometry.kernel_block_size)
    is_own &= columns < geometry.width
    rows = np.arange(positions.size)
    ids = table[rows, np.where(is_own, columns, 0)].astype(np.int64)
    return np.where(
        is_own & (ids != NULL_BLOCK), ids * geometry.kernel_block_size + offsets, PAD_SLOT
    )


def _state_slots(geometry: RowGeometry, positions: _Ints, slots: _Ints) -> _Ints:
    """Return the slot of the state that each token completes, else ``PAD_SLOT``."""
    ratio = geometry.tokens_per_state
    completes = (slots >= 0) & (positions >= 0) & ((positions + 1) % ratio == 0)
    return np.where(completes, slots // ratio, PAD_SLOT)
