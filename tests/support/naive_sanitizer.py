"""A second, naive sanitizer: loops over rows, columns and tokens, by the layout's own functions.

It says where a step is at fault, without regard to what it reads or to speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.support.small_engine import SmallStep

from bt_tables.sanitizer import FaultKind
from bt_width import NULL_BLOCK, PAD_SLOT, BlockTableLayout


class Place(NamedTuple):
    """Where a fault is: in a column of a row, at a token, or, without both, in a whole row."""

    kind: FaultKind
    group: int | None
    row: int | None
    column: int | None = None
    token: int | None = None


class Row(NamedTuple):
    """One request's numbers in one group."""

    computed: int
    length: int
    blocks: int
    ids: list[int]


def naive_faults(
    layouts: Sequence[BlockTableLayout], pools: Sequence[int], step: SmallStep, *, with_refs: bool
) -> set[Place]:
    """Return every fault of a step."""
    starts = step.query_start_loc.tolist()
    wrong = {
        Place(FaultKind.QUERY_START, None, at)
        for at, start in enumerate(starts)
        if start < (starts[at - 1] if at else 0) or (at == 0 and start)
    }
    num_reqs = step.num_blocks_of_row.shape[0]
    if starts[num_reqs] > step.slot_mappings.shape[1]:
        wrong.add(Place(FaultKind.QUERY_START, None, num_reqs))
    if wrong:
        return wrong
    return {
        place
        for group, layout in enumerate(layouts)
        for place in _group(layout, pools[group], step, group, with_refs=with_refs)
    }


def _group(
    layout: BlockTableLayout, pool: int, step: SmallStep, group: int, *, with_refs: bool
) -> Iterator[Place]:
    rows = list(_rows(layout, step, group))
    for at, row in enumerate(rows):
        yield from _row(layout, pool, step, group, at, row)
        if with_refs:
            yield from _exchanged(layout, pool, step, group, at, row)
    for at in range(len(rows), step.block_tables[group].shape[0]):
        for column, value in enumerate(step.block_tables[group][at].tolist()):
            if value != NULL_BLOCK:
                yield Place(FaultKind.PADDING_ROW, group, at, column)
    yield from _owners(layout, pool, step, group, rows, with_refs=with_refs)
    yield from _slots(layout, step, group, rows)


def _rows(layout: BlockTableLayout, step: SmallStep, group: int) -> Iterator[Row]:
    starts = step.query_start_loc.tolist()
    for at, length in enumerate(step.seq_lens[: step.num_blocks_of_row.shape[0]].tolist()):
        query = starts[at + 1] - starts[at]
        most = layout.limits.max_tokens
        clamped = min(max(length, 0), most)
        yield Row(
            computed=min(max(length - query, 0), clamped),
            length=clamped,
            blocks=int(step.num_blocks_of_row[at, group]),
            ids=step.block_tables[group][at].tolist(),
        )


def _touched(layout: BlockTableLayout, row: Row) -> tuple[set[int], set[int]]:
    """Return the columns that are read and those that are written, token by token."""
    if layout.kind in ("mamba", "ring"):
        spec = layout.spec
        extra = getattr(spec, "num_speculative_blocks", 0)
        column = layout.state_column if layout.kind == "mamba" else lambda _: 0
        read = {column(row.computed)} if row.computed else set()
        first = column(row.length)
        is_step = row.length > row.computed
        return read, set(range(first, first + 1 + extra)) if is_step else set()
    seen_from = 0
    if layout.kind == "window":
        spec = layout.spec
        kept = spec.window - 1 + spec.extra_retained_tokens  # type: ignore[union-attr]  # a window
        seen_from = max(row.computed - kept, 0)
    rank = layout.limits.context_parallel.rank
    own = [
        (position, layout.locate(position).column)
        for position in range(seen_from, row.length)
        if layout.locate(position).rank == rank
    ]
    return {column for _, column in own}, {c for position, c in own if position >= row.computed}


def _live(layout: BlockTableLayout, row: Row) -> int:
    return min(max(row.blocks, 0), layout.blocks_per_row) * layout.kernel_blocks_per_block


def _row(
    layout: BlockTableLayout, pool: int, step: SmallStep, group: int, at: int, row: Row
) -> Iterator[Place]:
    split = layout.kernel_blocks_per_block
    starts = step.query_start_loc.tolist()
    length = int(step.seq_lens[at])
    if length < starts[at + 1] - starts[at] or length > layout.limits.max_tokens:
        yield Place(FaultKind.LENGTH, group, at)
    if not 0 <= row.blocks <= layout.blocks_per_row:
        yield Place(FaultKind.BLOCK_COUNT, group, at)
    live = _live(layout, row)
    read, written = _touched(layout, row)
    if max(read | written, default=-1) // split >= max(row.blocks, 0):
        yield Place(FaultKind.TOO_FEW_BLOCKS, group, at, live)
    for column, value in enumerate(row.ids):
        if column >= live:
            if value != NULL_BLOCK:
                yield Place(FaultKind.STALE_TAIL, group, at, column)
            continue
        if value != NULL_BLOCK and not split <= value < pool * split:
            yield Place(FaultKind.OUT_OF_POOL, group, at, column)
        if value == NULL_BLOCK and column in read | written:
            yield Place(FaultKind.NULL_BLOCK, group, at, column)
        head = row.ids[column - column % split] // split
        if split > 1 and value != (head * split + column % split if head else NULL_BLOCK):
            yield Place(FaultKind.BROKEN_SPLIT, group, at, column)


def _exchanged(
    layout: BlockTableLayout, pool: int, step: SmallStep, group: int, at: int, row: Row
) -> Iterator[Place]:
    split = layout.kernel_blocks_per_block
    given = step.ref_blocks[group][at].tolist()
    for column in range(0, _live(layout, row), split):
        block = row.ids[column] // split
        wanted = given[column // split] if column // split < len(given) else NULL_BLOCK
        if 0 < block < pool and block != wanted:
            yield Place(FaultKind.WRONG_BLOCK, group, at, column)


def _owners(
    layout: BlockTableLayout,
    pool: int,
    step: SmallStep,
    group: int,
    rows: Sequence[Row],
    *,
    with_refs: bool,
) -> Iterator[Place]:
    split = layout.kernel_blocks_per_block
    holders: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)
    for at, row in enumerate(rows):
        _, written = _touched(layout, row)
        for column in range(0, _live(layout, row), split):
            block = row.ids[column] // split
            if 0 < block < pool:
                is_written = any(part in written for part in range(column, column + split))
                holders[block].append((at, column, is_written))
    for block, claims in holders.items():
        refs = int(step.ref_counts[group][block])
        for turn, (at, column, is_written) in enumerate(claims):
            if not with_refs:
                if turn and any(written for _, _, written in claims):
                    yield Place(FaultKind.DUPLICATE_BLOCK, group, at, column)
                continue
            if refs <= 0:
                yield Place(FaultKind.FREED_BLOCK, group, at, column)
            elif turn >= refs:
                yield Place(FaultKind.DUPLICATE_BLOCK, group, at, column)
            if is_written and refs > 1:
                yield Place(FaultKind.SHARED_WRITE, group, at, column)


def _slots(
    layout: BlockTableLayout, step: SmallStep, group: int, rows: Sequence[Row]
) -> Iterator[Place]:
    starts = step.query_start_loc.tolist()
    writers: dict[int, list[int]] = defaultdict(list)
    for token, slot in enumerate(step.slot_mappings[group].tolist()):
        at = next((i for i in range(len(rows)) if starts[i] <= token < starts[i + 1]), None)
        if at is None:
            if slot != PAD_SLOT:
                yield Place(FaultKind.PADDING_SLOT, group, None, token=token)
            continue
        position = int(step.seq_lens[at]) - starts[at + 1] + token
        ids = [max(value, NULL_BLOCK) for value in rows[at].ids]
        expected = layout.slot(position, ids)
        if slot != expected:
            # which of the kinds of wrong slot it is, the fault tests say
            yield Place(FaultKind.WRONG_SLOT, group, at, token=token)
        if slot == PAD_SLOT:
            continue
        first = writers[slot][0] if writers[slot] else None
        writers[slot].append(at)
        if first is not None and not (layout.slot_mode != "block" and first == at):
            yield Place(FaultKind.SLOT_TWICE, group, at, token=token)
