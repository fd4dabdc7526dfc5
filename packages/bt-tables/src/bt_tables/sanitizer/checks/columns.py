"""Checks of each column alone: in the pool, whole, not null where touched, null past the row."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bt_width import NULL_BLOCK

from ..findings import FaultKind
from ..plans import LINE
from ..step import GroupStep
from .faults import Faults
from .rows import RowFacts


def column_faults(group: GroupStep, facts: RowFacts, marks: torch.Tensor) -> Iterator[Faults]:
    """Yield wrong columns; past a row's blocks as far as its mark [rows], and to the line's end."""
    plan, reach = group.plan, facts.reach
    known = torch.maximum(facts.live, marks.long())
    scanned = ((known // LINE + 1) * LINE).clamp(max=plan.width)
    num_columns = int(scanned.max()) if scanned.numel() else 0
    ids = group.table[:, :num_columns].long()
    columns = torch.arange(num_columns, device=ids.device)
    is_live = columns < facts.live[:, None]
    is_past = ~is_live & (columns < scanned[:, None]) & (ids != NULL_BLOCK)
    is_request = (torch.arange(ids.shape[0], device=ids.device) < facts.num_reqs)[:, None]
    zero = torch.zeros_like(ids)

    def faults(kind: FaultKind, where: torch.Tensor, expected: torch.Tensor | None) -> Faults:
        row, column = where.nonzero(as_tuple=True)
        return Faults(
            kind=kind,
            group=group.group,
            row=row,
            column=column,
            value=ids[row, column],
            expected=None if expected is None else expected[row, column],
        )

    last = plan.num_blocks * plan.split
    is_id = (ids >= plan.split) & (ids < last)
    yield faults(FaultKind.OUT_OF_POOL, is_live & ~is_id & (ids != NULL_BLOCK), None)
    is_touched = _within(columns, reach.read_from, reach.read_to)
    is_touched |= _within(columns, reach.write_from, reach.write_to)
    yield faults(FaultKind.NULL_BLOCK, is_live & is_touched & (ids == NULL_BLOCK), None)
    if plan.split > 1:
        whole = _continued(ids, plan.split)
        yield faults(FaultKind.BROKEN_SPLIT, is_live & (ids != whole), whole)
    yield faults(FaultKind.STALE_TAIL, is_past & is_request, zero)
    yield faults(FaultKind.PADDING_ROW, is_past & ~is_request, zero)


def _within(columns: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    return (columns >= start[:, None]) & (columns < end[:, None])


def _continued(ids: torch.Tensor, split: int) -> torch.Tensor:
    """Return what each column must hold, going by the first column of its block."""
    columns = torch.arange(ids.shape[1], device=ids.device)
    part = columns % split
    first = ids[:, columns - part] // split * split
    return torch.where(first == NULL_BLOCK, NULL_BLOCK, first + part)
