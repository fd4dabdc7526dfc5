"""Blocks that belong to no request, to two, or to others too."""

from __future__ import annotations

from tests.support.planted.loop import Expected, Loop, Planted, rows_of, tokens_of
from tests.support.small_engine import SmallStep

from bt_tables.sanitizer import FaultKind
from bt_width import NULL_BLOCK


def block_handed_out_twice(loop: Loop) -> Planted:
    """The allocator's free list holds a block that is in use."""
    pool = loop.engine.pools[0]
    step, row = loop.after(
        lambda step: next((row for row in rows_of(step) if step.requests[row].blocks[0]), None)
    )
    block = step.requests[row].blocks[0][0]
    pool.free.appendleft(block)

    def two_holders(step: SmallStep) -> tuple[int, int, int] | None:
        holders = [
            (row, column)
            for row in rows_of(step)
            for column, held in enumerate(step.requests[row].blocks[0])
            if held == block
        ]
        return (holders[0][0], *holders[1]) if len(holders) > 1 else None

    step, (owner, row, column) = loop.until(two_holders)
    column *= loop.layouts[0].kernel_blocks_per_block
    expected = Expected(FaultKind.DUPLICATE_BLOCK, 0, row, column, other_owner=owner)
    return Planted(step, expected)


def written_past_a_row(loop: Loop) -> Planted:
    """A writer without a bound puts the last id of a row into the next one."""

    def is_full_of_ids(step: SmallStep) -> int | None:
        return next(
            (
                row
                for row in rows_of(step)[1:]
                if step.block_tables[3][row, 0] and step.block_tables[3][row - 1, 0]
            ),
            None,
        )

    step, row = loop.until(is_full_of_ids)
    table = step.block_tables[3]
    table[row, 0] = table[row - 1, loop.live(step, 3, row - 1) - 1]
    expected = Expected(FaultKind.DUPLICATE_BLOCK, 3, row, 0, other_owner=row - 1)
    return Planted(step, expected)


def freed_too_early(loop: Loop) -> Planted:
    """A block went back to the pool while a step still uses it."""
    step, row = loop.until(
        lambda step: next((row for row in rows_of(step) if step.requests[row].blocks[3]), None)
    )
    step.ref_counts[3][step.requests[row].blocks[3][1]] = 0
    return Planted(step, Expected(FaultKind.FREED_BLOCK, group=3, row=row, column=1))


def window_not_nulled(loop: Loop) -> Planted:
    """Blocks behind a window are freed, and their ids stay in the row."""
    loop.engine.tables.null_prefix = lambda *_: None  # type: ignore[method-assign]  # a fault

    def has_freed(step: SmallStep) -> tuple[int, int] | None:
        return next(
            (
                (row, column)
                for row in rows_of(step)
                for column, block in enumerate(step.requests[row].blocks[1])
                if block == NULL_BLOCK and not step.ref_counts[1][step.block_tables[1][row, column]]
            ),
            None,
        )

    step, (row, column) = loop.until(has_freed)
    return Planted(step, Expected(FaultKind.FREED_BLOCK, group=1, row=row, column=column))


def prefix_hit_rounded_up(loop: Loop) -> Planted:
    """A hit ends inside a block, which is then shared and written."""
    layout = loop.layouts[1]
    step, row = loop.until(
        lambda step: next((row for row in rows_of(step) if tokens_of(step, row)), None)
    )
    column = (int(step.seq_lens[row]) - 1) // layout.block_size
    step.ref_counts[1][step.requests[row].blocks[1][column]] += 1
    return Planted(step, Expected(FaultKind.SHARED_WRITE, group=1, row=row, column=column))


def exchanged_states(loop: Loop) -> Planted:
    """Two columns of a row of states are exchanged."""

    def row_of_states(step: SmallStep) -> int | None:
        return next((row for row in rows_of(step) if step.block_tables[3][row, :2].all()), None)

    step, row = loop.until(row_of_states)
    step.block_tables[3][row, :2] = step.block_tables[3][row, :2].flip(0)
    return Planted(step, Expected(FaultKind.WRONG_BLOCK, group=3, row=row, column=0))


def exchanged_unwritten_columns(loop: Loop) -> Planted:
    """Two columns that the step only reads are exchanged."""

    def row_with_history(step: SmallStep) -> int | None:
        size = loop.layouts[1].block_size
        starts = step.query_start_loc.diff().tolist()
        computed = [int(step.seq_lens[row]) - starts[row] for row in rows_of(step)]
        return next((row for row in rows_of(step) if computed[row] >= 2 * size), None)

    step, row = loop.until(row_with_history)
    step.block_tables[1][row, :2] = step.block_tables[1][row, :2].flip(0)
    return Planted(step, Expected(FaultKind.WRONG_BLOCK, group=1, row=row, column=1))


def rotated_rows(loop: Loop) -> Planted:
    """The rows of three requests are rotated in a group without slots."""

    def three_rows(step: SmallStep) -> bool | None:
        return True if len(step.requests) >= 3 and bool(step.block_tables[3][:3, 0].all()) else None

    step, _ = loop.until(three_rows)
    step.block_tables[3][:3] = step.block_tables[3][:3].roll(1, dims=0)
    return Planted(step, Expected(FaultKind.WRONG_BLOCK, group=3, row=2, column=0))
