"""Checks a step, one vectorised check after another: the truth for the kernel.

It reads the columns that rows hold, the columns that may be stale, and the slots. Every check
yields the faults of one kind in one group, where there are any: what a sound step costs is the
comparisons alone. All arrays of rows are [rows], padding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from bt_width import MAX_POSITION, NULL_BLOCK, PAD_SLOT, Addressing

from ..reference.addressing import local_lengths, locate
from .faults import NO_ROW, Faults
from .findings import FaultKind
from .step import CheckedStep, GroupStep

LINE = 32
"""Columns that are read together: a cache line of ids."""


def find_faults(step: CheckedStep, marks: torch.Tensor) -> list[Faults]:
    """Return every fault of a step, those nearest to the cause first.

    Args:
        step: The step.
        marks: [G, rows] int32. Past a row's blocks, columns at or above its mark are
            known to be null and are not read.
    """
    return faults_of(step, [rows_of(step, group) for group in step.groups], marks)


def faults_of(step: CheckedStep, rows: Sequence[Rows], marks: torch.Tensor) -> list[Faults]:
    """Return what ``find_faults`` does, given the rows of each group."""
    num_slots = min((group.slots.shape[0] for group in step.groups), default=0)
    broken = list(query_faults(step, num_slots)) if step.groups else []
    if broken:
        # then no token can be assigned to a request
        return broken
    return [
        faults
        for group, of_group in zip(step.groups, rows, strict=True)
        for faults in _group_faults(step, group, of_group, marks[group.group])
    ]


def _group_faults(
    step: CheckedStep, group: GroupStep, rows: Rows, marks: torch.Tensor
) -> Iterator[Faults]:
    yield from length_faults(step, group)
    yield from count_faults(group, rows)
    yield from column_faults(group, rows, marks[: group.table.shape[0]])
    claims = claims_of(group, rows)
    owners = owners_of(claims)
    yield from owner_faults(group, claims, owners, shared_writes=step.checks_shared_writes)
    yield from slot_faults(group, tokens_of(step, group), owners)


class Reach(NamedTuple):
    """The columns that a step touches in each row: ``[read_from, read_to)`` and the same of writes.

    All are [R] int64; a range is empty where its ends are equal.
    """

    read_from: torch.Tensor
    read_to: torch.Tensor
    write_from: torch.Tensor
    write_to: torch.Tensor

    @property
    def end(self) -> torch.Tensor:
        """The first column past everything that is touched."""
        return torch.maximum(self.read_to, self.write_to)


def reach_of(addressing: Addressing, computed: torch.Tensor, lengths: torch.Tensor) -> Reach:
    """Return what a step touches that takes requests from ``computed`` to ``lengths`` tokens.

    A row of states is read where the last step wrote, and written where this one ends.
    A row of tokens is read as far back as a query sees, and written where tokens are new.
    """
    if not addressing.advances:
        read_from = (computed - 1).clamp(min=0) // addressing.tokens_per_state_column
        write_from = (lengths - 1).clamp(min=0) // addressing.tokens_per_state_column
        return Reach(
            read_from,
            read_from + (computed > 0).long(),
            write_from,
            write_from + (lengths > computed).long() * addressing.states_per_step,
        )
    size = addressing.kernel_block_size
    before = local_lengths(addressing, computed)
    after = local_lengths(addressing, lengths)
    read_to = -(-after // size)
    # a window implies an unsharded group, so that global and local positions are the same
    seen_from = (computed - addressing.visible_tokens).clamp(min=0)
    read_from = torch.minimum(seen_from // size, read_to)
    write_from = torch.minimum(before // size, read_to)
    return Reach(read_from, read_to, write_from, torch.where(after > before, read_to, write_from))


class Rows(NamedTuple):
    """What is known of each row of a group's table; all [rows] int64, zero where it is padding.

    Attributes:
        num_reqs: Rows that hold a request.
        computed: Tokens before this step.
        lengths: Tokens after it.
        blocks: Blocks that the row holds.
        live: Columns of those blocks, at most the width.
        reach: Columns that the step touches.
        checks_untouched: Whether other columns are looked at.
    """

    num_reqs: int
    computed: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    live: torch.Tensor
    reach: Reach
    checks_untouched: bool

    def looked_at(self, columns: torch.Tensor, split: int) -> torch.Tensor:
        """Return [rows, columns] where a live column is to be checked, its whole block alike."""
        is_live = columns < self.live[:, None]
        if self.checks_untouched:
            return is_live
        first = columns - columns % split
        reach = self.reach
        is_touched = _overlaps(first, split, reach.read_from, reach.read_to)
        return is_live & (is_touched | _overlaps(first, split, reach.write_from, reach.write_to))


def rows_of(step: CheckedStep, group: GroupStep) -> Rows:
    """Return the numbers of a group's rows, impossible ones clamped to possible ones."""
    num_reqs = step.num_reqs
    padding = (0, group.table.shape[0] - num_reqs)
    pad = torch.nn.functional.pad
    addressing = group.addressing
    starts = step.query_start_loc.long()
    lengths = step.seq_lens.long()
    computed = lengths - starts[1 : num_reqs + 1] + starts[:num_reqs]
    lengths = pad(lengths.clamp(0, addressing.max_tokens), padding)
    computed = torch.minimum(pad(computed.clamp(min=0), padding), lengths)
    blocks = pad(step.num_blocks_of_row[:, group.group].long(), padding)
    split = addressing.kernel_blocks_per_block
    live = blocks.clamp(0, addressing.blocks_per_row) * split
    reach = reach_of(addressing, computed, lengths)
    return Rows(num_reqs, computed, lengths, blocks, live, reach, step.checks_untouched)


def query_faults(step: CheckedStep, num_slots: int) -> Iterator[Faults]:
    """Yield where ``query_start_loc`` does not rise from 0 to at most ``num_slots``."""
    starts = step.query_start_loc.long()
    kind = FaultKind.QUERY_START
    previous = torch.cat([starts.new_zeros(1), starts[:-1]])
    falls = starts < previous
    falls[0] = starts[0] != 0
    if falls.any():
        at = falls.nonzero()[:, 0]
        yield Faults(kind=kind, group=None, row=at, value=starts[at], expected=previous[at])
    total = starts[step.num_reqs : step.num_reqs + 1]
    over = (total > num_slots).nonzero()[:, 0]
    if len(over):
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
    longest = group.addressing.max_tokens
    queries = starts[1 : step.num_reqs + 1] - starts[: step.num_reqs]
    kind = FaultKind.LENGTH
    for wrong, expected in (
        (lengths < queries, queries),
        (lengths > longest, torch.full_like(queries, longest)),
    ):
        if wrong.any():
            at = wrong.nonzero()[:, 0]
            value = lengths[at]
            yield Faults(kind=kind, group=group.group, row=at, value=value, expected=expected[at])


def count_faults(group: GroupStep, rows: Rows) -> Iterator[Faults]:
    """Yield rows whose number of blocks no row can have, or is too small for the tokens."""
    most = group.addressing.blocks_per_row
    possible = rows.blocks.clamp(0, most)
    is_impossible = rows.blocks != possible
    if is_impossible.any():
        at = is_impossible.nonzero()[:, 0]
        yield Faults(
            kind=FaultKind.BLOCK_COUNT,
            group=group.group,
            row=at,
            value=rows.blocks[at],
            expected=possible[at],
        )
    needed = -(-rows.reach.end // group.addressing.kernel_blocks_per_block)
    is_short = needed > rows.blocks.clamp(min=0)
    if is_short.any():
        at = is_short.nonzero()[:, 0]
        yield Faults(
            kind=FaultKind.TOO_FEW_BLOCKS,
            group=group.group,
            row=at,
            column=rows.live[at],
            value=rows.blocks[at],
            expected=needed[at],
        )


def column_faults(group: GroupStep, rows: Rows, marks: torch.Tensor) -> Iterator[Faults]:
    """Yield wrong columns; past a row's blocks as far as its mark [rows], and to the line's end."""
    reach, split = rows.reach, group.addressing.kernel_blocks_per_block
    known = torch.maximum(rows.live, marks.long())
    scanned = ((known // LINE + 1) * LINE).clamp(max=group.addressing.width)
    num_columns = int(scanned.max()) if scanned.numel() else 0
    ids = group.table[:, :num_columns].long()
    columns = torch.arange(num_columns, device=ids.device)
    is_live = rows.looked_at(columns, split)
    is_past = (columns >= rows.live[:, None]) & (columns < scanned[:, None]) & (ids != NULL_BLOCK)
    is_request = (torch.arange(ids.shape[0], device=ids.device) < rows.num_reqs)[:, None]
    zero = ids.new_zeros(()).expand_as(ids)

    def faults(
        kind: FaultKind, where: torch.Tensor, expected: torch.Tensor | None
    ) -> Iterator[Faults]:
        if where.any():
            row, column = where.nonzero(as_tuple=True)
            yield Faults(
                kind=kind,
                group=group.group,
                row=row,
                column=column,
                value=ids[row, column],
                expected=None if expected is None else expected[row, column],
            )

    is_id = (ids >= split) & (ids < group.num_blocks * split)
    yield from faults(FaultKind.OUT_OF_POOL, is_live & ~is_id & (ids != NULL_BLOCK), None)
    is_touched = _within(columns, reach.read_from, reach.read_to)
    is_touched |= _within(columns, reach.write_from, reach.write_to)
    yield from faults(FaultKind.NULL_BLOCK, is_live & is_touched & (ids == NULL_BLOCK), None)
    if split > 1:
        whole = _continued(ids, split)
        yield from faults(FaultKind.BROKEN_SPLIT, is_live & (ids != whole), whole)
    if group.ref_blocks is not None:
        given = _given(group.ref_blocks, rows.num_reqs, ids.shape, split)
        # the other columns of a block are those that the first one says, or broken-split
        is_head = is_live & is_request & (columns % split == 0)
        is_wrong = is_head & is_id & (ids // split != given)
        yield from faults(FaultKind.WRONG_BLOCK, is_wrong, given * split)
    if rows.checks_untouched:
        yield from faults(FaultKind.STALE_TAIL, is_past & is_request, zero)
    yield from faults(FaultKind.PADDING_ROW, is_past & ~is_request, zero)


def _given(ref_blocks: torch.Tensor, num_reqs: int, shape: torch.Size, split: int) -> torch.Tensor:
    """Return [rows, columns] the block that each column was given, null past what is known."""
    given = ref_blocks[:num_reqs].long().repeat_interleave(split, dim=1)[:, : shape[1]]
    padding = (0, shape[1] - given.shape[1], 0, shape[0] - num_reqs)
    return torch.nn.functional.pad(given, padding, value=NULL_BLOCK)


def _overlaps(
    first: torch.Tensor, split: int, start: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """Return where the columns of a block, from its first, are among those of a range."""
    # a range without columns touches no block, wherever it lies
    is_range = (start < end)[:, None]
    return is_range & (first + split > start[:, None]) & (first < end[:, None])


def _within(columns: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    return (columns >= start[:, None]) & (columns < end[:, None])


def _continued(ids: torch.Tensor, split: int) -> torch.Tensor:
    """Return what each column must hold, going by the first column of its block."""
    columns = torch.arange(ids.shape[1], device=ids.device)
    part = columns % split
    first = ids[:, columns - part] // split * split
    return torch.where(first == NULL_BLOCK, NULL_BLOCK, first + part)


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


def claims_of(group: GroupStep, rows: Rows) -> Claims:
    """Return the claims of all live rows on blocks of the pool."""
    split, reach = group.addressing.kernel_blocks_per_block, rows.reach
    num_columns = int(rows.live.max()) if rows.live.numel() else 0
    blocks = group.table[:, :num_columns:split].long() // split
    columns = torch.arange(0, num_columns, split, device=blocks.device)
    is_claim = rows.looked_at(columns, split) & (blocks > 0) & (blocks < group.num_blocks)
    row, at = is_claim.nonzero(as_tuple=True)
    is_written = _overlaps(columns, split, reach.write_from, reach.write_to)[row, at]
    block = blocks[row, at]
    return Claims(block, row, columns[at], is_written, _turns(block))


class Owners(NamedTuple):
    """The first row that holds each block; as large as the claims, not as the pool.

    Attributes:
        block: [blocks] int64, rising.
        row: [blocks] int64.
    """

    block: torch.Tensor
    row: torch.Tensor

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """Return the first owners of blocks, ``NO_ROW`` where there is none."""
        if not self.block.numel():
            return torch.full_like(block, NO_ROW)
        at = torch.searchsorted(self.block, block).clamp(max=self.block.shape[0] - 1)
        return torch.where(self.block[at] == block, self.row[at], NO_ROW)


def owners_of(claims: Claims) -> Owners:
    """Return the requests that hold the claimed blocks."""
    first = claims.at(claims.turn == 0)
    block, order = torch.sort(first.block)
    return Owners(block, first.row[order])


def owner_faults(
    group: GroupStep, claims: Claims, owners: Owners, *, shared_writes: bool
) -> Iterator[Faults]:
    """Yield freed, doubly held and shared blocks; without counts, those written and held twice."""
    if group.ref_counts is None:
        written = claims.block[claims.is_written]
        doubled = (claims.turn > 0) & torch.isin(claims.block, written)
        yield from _claim_faults(FaultKind.DUPLICATE_BLOCK, group, claims, doubled, owners)
        return
    references = group.ref_counts.long()[claims.block]
    yield from _claim_faults(FaultKind.FREED_BLOCK, group, claims, references <= 0, None)
    doubled = (references > 0) & (claims.turn >= references)
    yield from _claim_faults(FaultKind.DUPLICATE_BLOCK, group, claims, doubled, owners)
    if shared_writes:
        shared = claims.is_written & (references > 1)
        yield from _claim_faults(FaultKind.SHARED_WRITE, group, claims, shared, owners)


def _turns(block: torch.Tensor) -> torch.Tensor:
    """Return how many earlier claims are on the same block."""
    in_order, order = torch.sort(block, stable=True)
    start = torch.searchsorted(in_order, in_order)
    turn = torch.empty_like(block)
    turn[order] = torch.arange(block.shape[0], device=block.device) - start
    return turn


def _claim_faults(
    kind: FaultKind, group: GroupStep, claims: Claims, where: torch.Tensor, owners: Owners | None
) -> Iterator[Faults]:
    if not where.any():
        return
    claims, other = claims.at(where), None
    if owners is not None:
        other = owners.of(claims.block)
        other = torch.where(other == claims.row, NO_ROW, other)
    yield Faults(
        kind=kind,
        group=group.group,
        row=claims.row,
        column=claims.column,
        value=claims.block * group.addressing.kernel_blocks_per_block,
        other=other,
    )


class Tokens(NamedTuple):
    """Every slot of a group's step, real tokens first; all are [tokens].

    Attributes:
        row: The token's request, ``NO_ROW`` where it is padding.
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
    addressing = group.addressing
    starts = step.query_start_loc.long()[: step.num_reqs + 1]
    token = torch.arange(group.slots.shape[0], device=group.slots.device)
    row = torch.searchsorted(starts[1:], token, right=True)
    is_real = row < step.num_reqs
    owner_row = torch.where(is_real, row, NO_ROW)
    if not step.num_reqs or not addressing.slot_blocks:
        nowhere = torch.full_like(token, PAD_SLOT)
        return Tokens(owner_row, torch.zeros_like(token), torch.zeros_like(is_real), nowhere)
    safe = row.clamp(max=step.num_reqs - 1)
    position = step.seq_lens.long()[safe] - starts[safe + 1] + token
    is_placed = is_real & (position >= 0) & (position <= MAX_POSITION)
    rank, column, offset = locate(addressing, position.clamp(0, MAX_POSITION))
    is_kept = is_placed & (rank == addressing.rank)
    column = torch.where(is_kept, column, 0)
    ids = group.table[safe, column.clamp(max=addressing.width - 1)].long()
    has_slot = is_kept & (column < addressing.width) & (ids > NULL_BLOCK)
    slots = ids * addressing.kernel_block_size + offset
    return Tokens(owner_row, column, is_kept, torch.where(has_slot, slots, PAD_SLOT))


def slot_faults(group: GroupStep, tokens: Tokens, owners: Owners) -> Iterator[Faults]:
    """Yield wrong slots, sorted by where they lie, then those that two tokens write."""
    is_wrong = group.slots != tokens.expected
    if is_wrong.any():
        yield from _wrong_slots(group, tokens, owners, is_wrong)
    is_twice = _twice(group, tokens)
    if is_twice is not None:
        yield is_twice


def _wrong_slots(
    group: GroupStep, tokens: Tokens, owners: Owners, is_wrong: torch.Tensor
) -> Iterator[Faults]:
    slots = group.slots
    is_pad = slots == PAD_SLOT
    is_real = tokens.row != NO_ROW
    block = slots // group.addressing.block_size
    is_pool = (slots >= 0) & (block < group.num_blocks)
    holder = owners.of(torch.where(is_pool, block, NULL_BLOCK))
    is_other = is_pool & (holder != NO_ROW) & (holder != tokens.row)
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
        token = (left & where).nonzero()[:, 0]
        if len(token):
            other = holder[token] if kind in _OWNED else None
            yield _slot_faults(kind, group, tokens, token, other)
        left = left & ~where


_OWNED = (FaultKind.NEIGHBOUR_SLOT, FaultKind.PADDING_SLOT)


def _twice(group: GroupStep, tokens: Tokens) -> Faults | None:
    """Return tokens that write a slot which an earlier one writes; a ring may come round."""
    used = ((tokens.row != NO_ROW) & (group.slots != PAD_SLOT)).nonzero()[:, 0]
    in_order, order = torch.sort(group.slots[used], stable=True)
    token = used[order]
    first = token[torch.searchsorted(in_order, in_order)]
    is_twice = token != first
    if not group.addressing.advances:
        is_twice &= tokens.row[token] != tokens.row[first]
    if not is_twice.any():
        return None
    token, first = token[is_twice], first[is_twice]
    other = torch.where(tokens.row[first] == tokens.row[token], NO_ROW, tokens.row[first])
    at = torch.argsort(token)
    return _slot_faults(FaultKind.SLOT_TWICE, group, tokens, token[at], other[at])


def _slot_faults(
    kind: FaultKind,
    group: GroupStep,
    tokens: Tokens,
    token: torch.Tensor,
    other: torch.Tensor | None,
) -> Faults:
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
