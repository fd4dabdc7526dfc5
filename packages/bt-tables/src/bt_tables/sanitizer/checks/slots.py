"""Checks of each token's slot: the one of its position in its own row, and of nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from bt_width import MAX_POSITION, NULL_BLOCK, PAD_SLOT

from ..findings import FaultKind
from ..plans import GroupPlan
from ..step import CheckedStep, GroupStep
from .faults import NOBODY, Faults
from .owners import Owners


class Tokens(NamedTuple):
    """Every slot of a group's step, real tokens first; all are [tokens].

    Attributes:
        row: The token's request, ``NOBODY`` where it is padding.
        column: The column of its position, 0 where it has none.
        is_kept: Whether this rank keeps it.
        expected: Its slot.
    """

    row: torch.Tensor
    column: torch.Tensor
    is_kept: torch.Tensor
    expected: torch.Tensor


def tokens_of(step: CheckedStep, group: GroupStep) -> Tokens:
    """Return where each token belongs, going by the table and the lengths."""
    plan, device = group.plan, group.slots.device
    starts = step.query_start_loc.long()[: step.num_reqs + 1]
    token = torch.arange(group.slots.shape[0], device=device)
    row = torch.searchsorted(starts[1:], token, right=True)
    is_real = row < step.num_reqs
    if not step.num_reqs:
        padding = torch.full_like(token, NOBODY)
        return Tokens(padding, token.new_zeros(token.shape), is_real, padding)
    safe = row.clamp(max=step.num_reqs - 1)
    position = step.seq_lens.long()[safe] - starts[safe + 1] + token
    is_placed = is_real & (position >= 0) & (position <= MAX_POSITION)
    owner, column, offset = _locate(plan, position.clamp(0, MAX_POSITION))
    is_kept = is_placed & (owner == plan.rank) & bool(plan.has_slots)
    column = torch.where(is_kept, column, 0)
    ids = group.table[safe, column.clamp(max=plan.width - 1)].long()
    has_slot = is_kept & (column < plan.width) & (ids > NULL_BLOCK)
    expected = torch.where(has_slot, ids * plan.kernel_block_size + offset, PAD_SLOT)
    return Tokens(torch.where(is_real, row, NOBODY), column, is_kept, expected)


def _locate(
    plan: GroupPlan, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rank, column and offset of positions, as ``layout.locate`` does."""
    if plan.keeps_state:
        zero = torch.zeros_like(position)
        return zero, zero, position % plan.kernel_block_size
    run, offset = position // plan.interleave, position % plan.interleave
    local = run // plan.shards * plan.interleave + offset
    size = plan.kernel_block_size
    return run % plan.shards, local // size, local % size


def slot_faults(group: GroupStep, tokens: Tokens, owners: Owners) -> Iterator[Faults]:
    """Yield wrong slots, sorted by where they lie."""
    slots = group.slots
    plan = group.plan
    is_wrong = slots != tokens.expected
    is_pad = slots == PAD_SLOT
    is_real = tokens.row != NOBODY
    block = slots // (plan.kernel_block_size * plan.split)
    is_pool = (slots >= 0) & (block < plan.num_blocks)
    holder = owners.of(torch.where(is_pool, block, NULL_BLOCK))
    is_other = is_pool & (holder != NOBODY) & (holder != tokens.row)
    left = is_wrong
    for kind, where in (
        (FaultKind.PADDING_SLOT, ~is_real),
        (FaultKind.MISSING_SLOT, is_pad),
        (FaultKind.FOREIGN_TOKEN, ~tokens.is_kept),
        (FaultKind.SLOT_OUT_OF_POOL, ~is_pool),
        (FaultKind.NULL_SLOT, block == NULL_BLOCK),
        (FaultKind.NEIGHBOUR_SLOT, is_other),
        (FaultKind.WRONG_SLOT, torch.ones_like(is_wrong)),
    ):
        yield _faults(kind, group, tokens, left & where, holder if kind in _OWNED else None)
        left = left & ~where
    yield _twice(group, tokens)


_OWNED = (FaultKind.NEIGHBOUR_SLOT, FaultKind.PADDING_SLOT)


def _twice(group: GroupStep, tokens: Tokens) -> Faults:
    """Return tokens that write a slot which an earlier one writes; a ring may come round."""
    used = ((tokens.row != NOBODY) & (group.slots != PAD_SLOT)).nonzero()[:, 0]
    in_order, order = torch.sort(group.slots[used], stable=True)
    token = used[order]
    first = token[torch.searchsorted(in_order, in_order)]
    is_twice = token != first
    if group.plan.keeps_state:
        is_twice &= tokens.row[token] != tokens.row[first]
    token, first = token[is_twice], first[is_twice]
    other = torch.where(tokens.row[first] == tokens.row[token], NOBODY, tokens.row[first])
    at = torch.argsort(token)
    return _faults(FaultKind.SLOT_TWICE, group, tokens, token[at], other[at])


def _faults(
    kind: FaultKind,
    group: GroupStep,
    tokens: Tokens,
    where: torch.Tensor,
    other: torch.Tensor | None = None,
) -> Faults:
    token = where.nonzero()[:, 0] if where.dtype == torch.bool else where
    if other is not None and other.shape != token.shape:
        other = other[token]
    is_padding = kind is FaultKind.PADDING_SLOT
    return Faults(
        kind=kind,
        group=group.group,
        row=tokens.row[token],
        column=None if is_padding else tokens.column[token],
        token=token,
        value=group.slots[token],
        expected=None if kind is FaultKind.SLOT_TWICE else tokens.expected[token],
        other=other,
    )
