"""The plain twin of the sanitizer's kernel: every check of a step, one after another."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .checks.columns import column_faults
from .checks.faults import Faults
from .checks.owners import claims_of, owner_faults, owners_of
from .checks.rows import count_faults, facts_of, length_faults, query_faults
from .checks.slots import slot_faults, tokens_of
from .step import CheckedStep, GroupStep


def find_faults(step: CheckedStep, marks: torch.Tensor) -> list[Faults]:
    """Return every fault of a step, those nearest to the cause first.

    Args:
        step: The step.
        marks: [G, rows] int32. Past a row's blocks, columns at or above its mark are
            known to be null and are not read.
    """
    num_slots = min((group.slots.shape[0] for group in step.groups), default=0)
    broken = [faults for faults in query_faults(step, num_slots) if step.groups and len(faults)]
    if broken:
        # nobody can say which token is whose
        return broken
    return [
        faults
        for group in step.groups
        for faults in _group_faults(step, group, marks[group.group])
        if len(faults)
    ]


def _group_faults(step: CheckedStep, group: GroupStep, marks: torch.Tensor) -> Iterator[Faults]:
    facts = facts_of(step, group)
    yield from length_faults(step, group)
    yield from count_faults(group, facts)
    yield from column_faults(group, facts, marks[: group.table.shape[0]])
    claims = claims_of(group, facts)
    owners = owners_of(claims)
    yield from owner_faults(group, claims, owners)
    yield from slot_faults(group, tokens_of(step, group), owners)


def live_columns(step: CheckedStep, group: GroupStep) -> torch.Tensor:
    """Return [rows] the columns below which a row may hold ids."""
    return facts_of(step, group).live
