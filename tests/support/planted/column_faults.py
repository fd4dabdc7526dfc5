"""Ids that are stale, missing, in the wrong unit, or in the wrong place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.support.planted.loop import Expected, Loop, Planted, rows_of, tokens_of
from tests.support.poison import POISON
from tests.support.small_engine import SmallStep

from bt_tables.sanitizer import FaultKind


def _row_with(condition: Callable[[SmallStep, int], bool]) -> Callable[[SmallStep], int | None]:
    """Return a search for the first row of a step that has something."""
    return lambda step: next((row for row in rows_of(step) if condition(step, row)), None)


def _padding_row(step: SmallStep) -> int | None:
    row = len(step.requests)
    return row if row < step.block_tables[0].shape[0] else None


def stale_tail(loop: Loop) -> Planted:
    """A shorter request in a longer one's row, whose tail was not cleared."""
    step, row = loop.until(
        _row_with(lambda step, row: loop.was_live(0, row) > loop.live(step, 0, row))
    )
    live, was_live = loop.live(step, 0, row), loop.was_live(0, row)
    step.block_tables[0][row, live:was_live] = loop.last_tables[0][row, live:was_live]
    return Planted(step, Expected(FaultKind.STALE_TAIL, group=0, row=row, column=live))


def dropped_append(loop: Loop) -> Planted:
    """A row that gained a block on the host was not marked for the device."""
    append = loop.engine.tables.append
    dropped: list[tuple[int, list[int]]] = []

    def drop_first(row: int, blocks: list[list[int]]) -> None:
        if not dropped and blocks[0]:
            dropped.append((row, blocks[0]))
            blocks = [[], *blocks[1:]]
        append(row, blocks)

    loop.engine.tables.append = drop_first  # type: ignore[method-assign,assignment]  # a fault
    step, row = loop.until(
        _row_with(lambda step, row: bool(dropped) and step.requests[row].row == dropped[0][0])
    )
    kept = len(step.requests[row].blocks[0]) - len(dropped[0][1])
    column = kept * loop.layouts[0].kernel_blocks_per_block
    return Planted(step, Expected(FaultKind.NULL_BLOCK, group=0, row=row, column=column))


def dropped_replacement(loop: Loop) -> Planted:
    """The row of a request that has left is still on the device when the next one runs."""

    def is_replaced(step: SmallStep, row: int) -> bool:
        if loop.last is None or row >= min(len(loop.last.requests), len(step.requests)):
            return False
        ids, old = step.block_tables[3][row], loop.last_tables[3][row]
        was_freed = bool(old[0]) and not step.ref_counts[3][int(old[0])]
        return bool(ids[0]) and bool(ids[0] != old[0]) and was_freed

    step, row = loop.until(_row_with(is_replaced))
    step.block_tables[3][row] = loop.last_tables[3][row]
    return Planted(step, Expected(FaultKind.FREED_BLOCK, group=3, row=row, column=0))


def table_of_capture_time(loop: Loop) -> Planted:
    """A replayed graph that never maps the table anew."""
    step, row = loop.until(_row_with(lambda step, row: loop.live(step, 0, row) > 0))
    step.block_tables[0].zero_()
    return Planted(step, Expected(FaultKind.NULL_BLOCK, group=0, row=row, column=0))


def state_at_another_groups_block_size(loop: Loop) -> Planted:
    """A state column computed with a block size that is not its group's."""
    size = loop.layouts[2].block_size
    step, row = loop.until(
        _row_with(lambda step, row: bool(tokens_of(step, row)) and int(step.seq_lens[row]) > size)
    )
    column = loop.layouts[2].state_column(int(step.seq_lens[row]))
    table = step.block_tables[2]
    table[row, column - 1] = table[row, column]
    table[row, column] = 0
    return Planted(step, Expected(FaultKind.NULL_BLOCK, group=2, row=row, column=column))


def no_block_for_a_draft_state(loop: Loop) -> Planted:
    """Fewer speculative blocks than the step has drafts."""
    step, row = loop.until(_row_with(lambda step, row: bool(tokens_of(step, row))))
    column = loop.layouts[2].state_column(int(step.seq_lens[row])) + 1
    step.block_tables[2][row, column] = 0
    return Planted(step, Expected(FaultKind.NULL_BLOCK, group=2, row=row, column=column))


def window_nulled_one_block_too_far(loop: Loop) -> Planted:
    """A count of skipped blocks that forgets what a drafter looks back at."""
    step, row = loop.until(
        _row_with(
            lambda step, row: (
                bool(step.block_tables[1][row].any()) and bool(step.seq_lens[row] > 20)
            )
        )
    )
    column = int(step.block_tables[1][row].nonzero()[0])
    step.block_tables[1][row, column] = 0
    return Planted(step, Expected(FaultKind.NULL_BLOCK, group=1, row=row, column=column))


def expanded_twice(loop: Loop) -> Planted:
    """A view that was expanded already is expanded again."""
    split, last = 4, loop.num_blocks[0] * 4
    step, row = loop.until(
        _row_with(lambda step, row: bool((step.block_tables[0][row] * split >= last).any()))
    )
    table = step.block_tables[0]
    column = int((table[row] * split >= last).nonzero()[0])
    live = loop.live(step, 0, row)
    table[row, :live] = table[row, :live] * split + torch.arange(live, dtype=torch.int32) % split
    return Planted(step, Expected(FaultKind.OUT_OF_POOL, group=0, row=row, column=column))


def block_ids_not_expanded(loop: Loop) -> Planted:
    """The manager's ids in a table whose columns are kernel blocks."""
    step, row = loop.until(_row_with(lambda step, row: loop.live(step, 0, row) >= 8))
    live = loop.live(step, 0, row)
    table = step.block_tables[0]
    blocks = table[row, :live:4] // 4
    table[row, :live] = 0
    table[row, : len(blocks)] = blocks
    return Planted(step, Expected(FaultKind.BROKEN_SPLIT, group=0, row=row))


def interleaved_rows(loop: Loop) -> Planted:
    """A table that was viewed at another width, so that neighbours' columns alternate."""
    step, row = loop.until(_row_with(lambda step, row: loop.live(step, 0, row) > 0))
    table = step.block_tables[0]
    table[row, 1] = table[row, 2]
    return Planted(step, Expected(FaultKind.BROKEN_SPLIT, group=0, row=row, column=1))


def null_block_expanded(loop: Loop) -> Planted:
    """Padding rows are mapped to the kernel blocks of the null block."""
    step, row = loop.until(_padding_row)
    step.block_tables[0][row] = torch.arange(loop.layouts[0].width) % 4
    return Planted(step, Expected(FaultKind.PADDING_ROW, group=0, row=row, column=1))


def padding_row_of_minus_one(loop: Loop) -> Planted:
    """The slots' padding value in a table."""
    step, row = loop.until(_padding_row)
    step.block_tables[3][row] = -1
    return Planted(step, Expected(FaultKind.PADDING_ROW, group=3, row=row, column=0))


def phantom_request(loop: Loop) -> Planted:
    """A padding row that still holds the request of an earlier, larger batch."""
    step, row = loop.until(
        lambda step: (
            row if (row := _padding_row(step)) is not None and loop.was_live(3, row) else None
        )
    )
    step.block_tables[3][row] = loop.last_tables[3][row]
    return Planted(step, Expected(FaultKind.PADDING_ROW, group=3, row=row, column=0))


def garbage_id(loop: Loop) -> Planted:
    """A host buffer that the device reads without a copy, and reads wrong."""
    step, row = loop.until(_row_with(lambda step, row: loop.live(step, 1, row) > 2))
    step.block_tables[1][row, 1] = POISON
    return Planted(step, Expected(FaultKind.OUT_OF_POOL, group=1, row=row, column=1))


def negative_id(loop: Loop) -> Planted:
    """A hole that is marked with -1 in the middle of a row."""
    step, row = loop.until(_row_with(lambda step, row: loop.live(step, 3, row) > 2))
    step.block_tables[3][row, 1] = -1
    return Planted(step, Expected(FaultKind.OUT_OF_POOL, group=3, row=row, column=1))


def rows_in_another_order(loop: Loop) -> Planted:
    """Tables with decodes first, lengths with prefills first."""
    step, _ = loop.until(
        lambda step: (
            True
            if len(step.requests) > 1 and loop.live(step, 0, 0) < loop.live(step, 0, 1)
            else None
        )
    )
    for table in step.block_tables:
        table[:2] = table[:2].flip(0)
    column = loop.live(step, 0, 0)
    return Planted(step, Expected(FaultKind.STALE_TAIL, group=0, row=0, column=column))


def reused_host_buffer(loop: Loop) -> Planted:
    """The next step's rows are written before the device has read this one's."""

    def next_is_longer(step: SmallStep) -> int | None:
        return next(
            (
                row
                for row in rows_of(step)
                if loop.last
                and row < len(loop.last.requests)
                and loop.live(step, 0, row) > loop.was_live(0, row)
            ),
            None,
        )

    _, row = loop.until(next_is_longer)
    step = loop.last
    assert step is not None
    column = loop.was_live(0, row)
    return Planted(step, Expected(FaultKind.STALE_TAIL, group=0, row=row, column=column))
