"""Does the builders' device work in NumPy: the truth for the kernels, and the way of a CPU."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from bt_tables.reference.addressing import local_lengths, locate
from bt_width import NULL_BLOCK, PAD_SLOT, Addressing

from .operations import (
    CommittedStates,
    DraftRows,
    ExpandedRows,
    MambaStates,
    StateBatch,
    TokenLens,
)

_Ints: TypeAlias = NDArray[np.integer[Any]]


def token_lens(
    addressing: Addressing,
    tokens_per_state: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out: TokenLens,
) -> None:
    """Write what each token sees; see ``Operations``."""
    _write_token_lens(addressing, tokens_per_state, query_start_loc.numpy(), seq_lens.numpy(), out)


def expand_rows(
    addressing: Addressing,
    tokens_per_state: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    lens: TokenLens,
    rows: ExpandedRows,
) -> None:
    """Write what each token sees, and its copy of a row; see ``Operations``."""
    req_of_token = _write_token_lens(
        addressing, tokens_per_state, query_start_loc.numpy(), seq_lens.numpy(), lens
    )
    num_live = -(-lens.local_lens.numpy() // (addressing.kernel_block_size // tokens_per_state))
    np.minimum(num_live, addressing.width, out=num_live)
    source, target, was_live = block_table.numpy(), rows.table.numpy(), rows.num_live.numpy()
    # a request's tokens stand together: what all of them see is copied at once
    firsts = np.flatnonzero(np.diff(req_of_token, prepend=-1))
    ends = np.append(firsts, len(num_live))[1:]
    common = np.minimum.reduceat(num_live, firsts) if firsts.size else num_live
    pieces = (req_of_token[firsts], firsts, ends, common)
    for req, first, end, stop in zip(*(piece.tolist() for piece in pieces), strict=True):
        if stop:
            target[first:end, :stop] = source[req, :stop]
    copied = np.repeat(common, ends - firsts)
    for token in np.flatnonzero(num_live > copied).tolist():
        columns = slice(copied[token], num_live[token])
        target[token, columns] = source[req_of_token[token], columns]
    for token in np.flatnonzero(num_live < was_live).tolist():
        target[token, num_live[token] : was_live[token]] = NULL_BLOCK
    was_live[:] = num_live


def _write_token_lens(
    addressing: Addressing,
    tokens_per_state: int,
    starts: _Ints,
    seq_lens: _Ints,
    out: TokenLens,
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
    # lengths and ends are the device's word: no row is read past its last token
    lens = seq_lens[req_of_token].astype(np.int64) - ends[req_of_token] + tokens + 1
    lens = np.where(is_real, lens.clip(0, addressing.max_tokens), 0)
    out.seq_lens.numpy()[:] = lens
    out.local_lens.numpy()[:] = local_lengths(addressing, lens) // tokens_per_state
    return req_of_token


def compress_slots(
    tokens_per_state: int, positions: torch.Tensor, slot_mapping: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the slot of the state that each token completes; see ``Operations``."""
    out.numpy()[:] = _state_slots(tokens_per_state, positions.numpy(), slot_mapping.numpy())


def step_drafts(
    addressing: Addressing,
    tokens_per_state: int,
    block_table: torch.Tensor,
    drafts: DraftRows,
    step: int,
) -> None:
    """Move drafts on; see ``Operations``."""
    old = drafts.seq_lens.numpy().astype(np.int64)
    moved = np.where(old > 0, old + step, 0)
    lens = np.minimum(moved, addressing.max_tokens)
    positions = lens - 1
    slots = _token_slots(addressing, positions, block_table.numpy())
    slots[moved > addressing.max_tokens] = PAD_SLOT
    drafts.seq_lens.numpy()[:] = lens
    drafts.local_lens.numpy()[:] = local_lengths(addressing, lens) // tokens_per_state
    drafts.positions.numpy()[:] = positions
    drafts.slot_mapping.numpy()[:] = _state_slots(tokens_per_state, positions, slots)


def state_ids(addressing: Addressing, pad: int, batch: StateBatch, out: MambaStates) -> None:
    """Write where each request's state comes from and goes to; see ``Operations``."""
    computed = _counts(batch.num_computed_tokens, 0, addressing.max_tokens)
    lens = _counts(batch.seq_lens, 0, addressing.max_tokens)
    accepted = _counts(batch.num_accepted_tokens, 1, addressing.states_per_step)
    first = _state_columns(addressing, lens)
    read = _state_columns(addressing, computed)
    table = batch.block_table.numpy()

    has_initial = (lens > 0) & (computed > 0)
    out.source_ids.numpy()[:] = _pick_states(table, read + accepted - 1, has_initial, pad)
    columns = first[:, None] + np.arange(addressing.states_per_step)
    out.state_ids.numpy()[:] = _pick_states(table, columns, (lens > 0)[:, None], pad)
    out.num_accepted_tokens.numpy()[:] = np.where(has_initial & (first == read), accepted, 1)
    out.has_initial_states.numpy()[:] = has_initial
    out.copies.numpy()[:] = has_initial & (first != read)


def commit_states(
    addressing: Addressing,
    pad: int,
    batch: StateBatch,
    accepted: torch.Tensor,
    out: CommittedStates,
) -> None:
    """Write which states each decode has to copy; see ``Operations``."""
    computed = _counts(batch.num_computed_tokens, 0, addressing.max_tokens)
    lens = _counts(batch.seq_lens, 0, addressing.max_tokens)
    before = _counts(batch.num_accepted_tokens, 1, addressing.states_per_step)
    is_live = lens > computed
    kept = np.minimum(computed + _counts(accepted, 1, addressing.states_per_step), lens)
    first, last = _state_columns(addressing, lens), _state_columns(addressing, kept)
    size = addressing.tokens_per_state_column
    # states that end a column after ``computed``, and the last state where it lies elsewhere
    num_ends = kept // size - computed // size
    ends_column = kept % size == 0
    moves = ends_column | (first != last)

    copies = np.arange(out.target_ids.shape[1])
    columns = (computed // size)[:, None] + copies
    is_end = copies < num_ends[:, None]
    is_last = (copies == num_ends[:, None]) & (moves & ~ends_column)[:, None]
    tokens = np.where(is_end, (columns + 1) * size, kept[:, None])
    sources = (first - computed - 1)[:, None] + tokens
    targets = np.where(is_end, columns, last[:, None])
    is_copied = is_live[:, None] & (is_end | is_last) & (sources != targets)
    table = batch.block_table.numpy()
    source_ids = _pick_states(table, sources, is_copied, pad)
    target_ids = _pick_states(table, targets, is_copied, pad)
    is_copied = (source_ids != pad) & (target_ids != pad)
    out.source_ids.numpy()[:] = np.where(is_copied, source_ids, pad)
    out.target_ids.numpy()[:] = np.where(is_copied, target_ids, pad)
    # a request without tokens keeps its state where it was
    unmoved = np.where(lens > 0, before, 1)
    out.num_accepted_tokens.numpy()[:] = np.where(
        is_live, np.where(moves, 1, kept - computed), unmoved
    )


def _counts(counts: torch.Tensor, least: int, most: int) -> NDArray[np.int64]:
    """Return counts that the device knows, clamped: they lead to columns."""
    clamped: NDArray[np.int64] = counts.numpy().astype(np.int64).clip(least, most)
    return clamped


def _state_columns(addressing: Addressing, num_tokens: _Ints) -> _Ints:
    """Return the column of each state after ``num_tokens``."""
    columns: _Ints = np.maximum(num_tokens - 1, 0) // addressing.tokens_per_state_column
    return columns


def _pick_states(table: _Ints, columns: _Ints, is_state: NDArray[np.bool_], pad: int) -> _Ints:
    """Return the id in each row's columns, or the pad: no state, past the width, or null."""
    inside = is_state & (columns >= 0) & (columns < table.shape[1])
    rows = np.arange(len(table)).reshape(-1, *[1] * (columns.ndim - 1))
    ids = np.where(inside, table[rows, np.where(inside, columns, 0)], NULL_BLOCK)
    states: _Ints = np.where(ids == NULL_BLOCK, pad, ids)
    return states


def _token_slots(addressing: Addressing, positions: _Ints, table: _Ints) -> NDArray[np.int64]:
    """Return the token's slot of one position a row; ``PAD_SLOT`` where this rank has none."""
    places = locate(addressing, np.maximum(positions, 0))
    is_own = (positions >= 0) & (places.rank == addressing.rank)
    is_own &= places.column < addressing.width
    rows = np.arange(positions.size)
    ids = table[rows, np.where(is_own, places.column, 0)].astype(np.int64)
    slots = ids * addressing.kernel_block_size + places.offset
    return np.where(is_own & (ids != NULL_BLOCK), slots, PAD_SLOT)


def _state_slots(tokens_per_state: int, positions: _Ints, slots: _Ints) -> _Ints:
    """Return the slot of the state that each token completes, else ``PAD_SLOT``."""
    completes = (slots >= 0) & (positions >= 0) & ((positions + 1) % tokens_per_state == 0)
    return np.where(completes, slots // tokens_per_state, PAD_SLOT)
