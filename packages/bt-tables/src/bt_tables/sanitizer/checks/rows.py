"""The numbers of each request, and checks of them alone: lengths, queries and block counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..findings import FaultKind
from ..plans import Reach, reach_of
from ..step import CheckedStep, GroupStep
from .faults import Faults


class RowFacts(NamedTuple):
    """What is known of each row of a group's table; all [rows] int64, zero where it is padding.

    Attributes:
        num_reqs: Rows that hold a request.
        computed: Tokens before this step.
        lengths: Tokens after it.
        blocks: Blocks that the row holds.
        live: Columns of those blocks, at most the width.
        reach: Columns that the step touches.
    """

    num_reqs: int
    computed: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    live: torch.Tensor
    reach: Reach


def facts_of(step: CheckedStep, group: GroupStep) -> RowFacts:
    """Return the facts of a group's rows, impossible numbers clamped to possible ones."""
    num_reqs, rows = step.num_reqs, group.table.shape[0]
    padding = (0, rows - num_reqs)
    pad = torch.nn.functional.pad
    plan = group.plan
    starts = step.query_start_loc.long()
    lengths = step.seq_lens.long()
    computed = lengths - starts[1 : num_reqs + 1] + starts[:num_reqs]
    lengths = pad(lengths.clamp(0, plan.max_tokens), padding)
    computed = torch.minimum(pad(computed.clamp(min=0), padding), lengths)
    blocks = pad(step.num_blocks_of_row[:, group.group].long(), padding)
    live = blocks.clamp(0, plan.width // plan.split) * plan.split
    return RowFacts(num_reqs, computed, lengths, blocks, live, reach_of(plan, computed, lengths))


def query_faults(step: CheckedStep, num_slots: int) -> Iterator[Faults]:
    """Yield where ``query_start_loc`` does not rise from 0 to at most ``num_slots``."""
    starts = step.query_start_loc.long()
    kind = FaultKind.QUERY_START
    previous = torch.cat([starts.new_zeros(1), starts[:-1]])
    falls = starts < previous
    falls[0] = starts[0] != 0
    at = falls.nonzero()[:, 0]
    yield Faults(kind=kind, group=None, row=at, value=starts[at], expected=previous[at])
    total = starts[step.num_reqs : step.num_reqs + 1]
    over = (total > num_slots).nonzero()[:, 0]
    yield Faults(
        kind=kind,
        group=None,
        row=over + step.num_reqs,
        value=total[over],
        expected=torch.full_like(over, num_slots),
    )


def length_faults(step: CheckedStep, group: GroupStep) -> Iterator[Faults]:
    """Yield requests that are shorter than their query, or longer than a row is planned for."""
    lengths, starts = step.seq_lens.long(), step.query_start_loc.long()
    queries = starts[1 : step.num_reqs + 1] - starts[: step.num_reqs]
    kind = FaultKind.LENGTH
    for wrong, expected in (
        (lengths < queries, queries),
        (lengths > group.plan.max_tokens, torch.full_like(queries, group.plan.max_tokens)),
    ):
        at = wrong.nonzero()[:, 0]
        yield Faults(kind=kind, group=group.group, row=at, value=lengths[at], expected=expected[at])


def count_faults(group: GroupStep, facts: RowFacts) -> Iterator[Faults]:
    """Yield rows whose number of blocks no row can have, or is too small for the tokens."""
    plan = group.plan
    most = plan.width // plan.split
    at = ((facts.blocks < 0) | (facts.blocks > most)).nonzero()[:, 0]
    yield Faults(
        kind=FaultKind.BLOCK_COUNT,
        group=group.group,
        row=at,
        value=facts.blocks[at],
        expected=facts.blocks[at].clamp(0, most),
    )
    needed = -(-facts.reach.end // plan.split)
    at = (needed > facts.blocks.clamp(min=0)).nonzero()[:, 0]
    yield Faults(
        kind=FaultKind.TOO_FEW_BLOCKS,
        group=group.group,
        row=at,
        column=facts.live[at],
        value=facts.blocks[at],
        expected=needed[at],
    )
