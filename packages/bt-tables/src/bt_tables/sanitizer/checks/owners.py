"""Checks of who holds a block: nobody, one row, or several that must not write to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..findings import FaultKind
from ..step import GroupStep
from .faults import NOBODY, Faults
from .rows import RowFacts


class Claims(NamedTuple):
    """Blocks that live rows hold, once for each time, in the order of rows and columns.

    Attributes:
        block: [claims] int64.
        row: [claims] int64.
        column: [claims] int64, the first of the block's columns.
        is_written: [claims] bool, whether the step writes to the block through this row.
        turn: [claims] int64, how many earlier claims are on the same block.
    """

    block: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    is_written: torch.Tensor
    turn: torch.Tensor

    def at(self, where: torch.Tensor) -> Claims:
        """Return some of the claims."""
        return Claims(*(values[where] for values in self))


def claims_of(group: GroupStep, facts: RowFacts) -> Claims:
    """Return the claims of all live rows on blocks of the pool."""
    split = group.plan.split
    num_columns = int(facts.live.max()) if facts.live.numel() else 0
    blocks = group.table[:, :num_columns:split].long() // split
    columns = torch.arange(0, num_columns, split, device=blocks.device)
    is_live = columns < facts.live[:, None]
    row, at = (is_live & (blocks > 0) & (blocks < group.plan.num_blocks)).nonzero(as_tuple=True)
    column = columns[at]
    reach = facts.reach
    is_written = (column + split > reach.write_from[row]) & (column < reach.write_to[row])
    # a range without columns touches no block, wherever it lies
    is_written &= reach.write_to[row] > reach.write_from[row]
    block = blocks[row, at]
    return Claims(block, row, column, is_written, _turns(block))


class Owners(NamedTuple):
    """The first row that holds each block; as large as the claims, not as the pool.

    Attributes:
        block: [blocks] int64, rising.
        row: [blocks] int64.
    """

    block: torch.Tensor
    row: torch.Tensor

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """Return the first owners of blocks, ``NOBODY`` where there is none."""
        if not self.block.numel():
            return torch.full_like(block, NOBODY)
        at = torch.searchsorted(self.block, block).clamp(max=self.block.shape[0] - 1)
        return torch.where(self.block[at] == block, self.row[at], NOBODY)


def owners_of(claims: Claims) -> Owners:
    """Return who holds the claimed blocks."""
    first = claims.at(claims.turn == 0)
    block, order = torch.sort(first.block)
    return Owners(block, first.row[order])


def owner_faults(group: GroupStep, claims: Claims, owners: Owners) -> Iterator[Faults]:
    """Yield freed, doubly held and shared blocks; without counts, those written and held twice."""
    if group.ref_counts is None:
        written = claims.block[claims.is_written]
        doubled = (claims.turn > 0) & torch.isin(claims.block, written)
        yield _faults(FaultKind.DUPLICATE_BLOCK, group, claims.at(doubled), owners)
        return
    references = group.ref_counts.long()[claims.block]
    yield _faults(FaultKind.FREED_BLOCK, group, claims.at(references <= 0), None)
    doubled = (references > 0) & (claims.turn >= references)
    yield _faults(FaultKind.DUPLICATE_BLOCK, group, claims.at(doubled), owners)
    shared = claims.is_written & (references > 1)
    yield _faults(FaultKind.SHARED_WRITE, group, claims.at(shared), owners)


def _turns(block: torch.Tensor) -> torch.Tensor:
    """Return how many earlier claims are on the same block."""
    in_order, order = torch.sort(block, stable=True)
    start = torch.searchsorted(in_order, in_order)
    turn = torch.empty_like(block)
    turn[order] = torch.arange(block.shape[0], device=block.device) - start
    return turn


def _faults(kind: FaultKind, group: GroupStep, claims: Claims, owners: Owners | None) -> Faults:
    other = None
    if owners is not None:
        other = owners.of(claims.block)
        other = torch.where(other == claims.row, NOBODY, other)
    return Faults(
        kind=kind,
        group=group.group,
        row=claims.row,
        column=claims.column,
        value=claims.block * group.plan.split,
        other=other,
    )
