"""Tensors of the wrong shape, type or address, and numbers that describe no batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.support.planted.loop import Expected, Loop, Planted, rows_of, tokens_of
from tests.support.small_engine import SmallStep

from bt_tables.sanitizer import FaultKind


def _with_table(step: SmallStep, group: int, table: torch.Tensor) -> SmallStep:
    tables = list(step.block_tables)
    tables[group] = table
    return replace(step, block_tables=tuple(tables))


def one_column_short(loop: Loop) -> Planted:
    """Two formulas for one width."""
    step = loop.engine.step()
    step = _with_table(step, 1, step.block_tables[1][:, :-1])
    return Planted(step, Expected(FaultKind.WIDTH, group=1))


def guard_column(loop: Loop) -> Planted:
    """A guard column in the storage that becomes part of the view."""
    step = loop.engine.step()
    table = step.block_tables[0]
    step = _with_table(step, 0, torch.cat([table, torch.zeros_like(table[:, :1])], 1))
    return Planted(step, Expected(FaultKind.WIDTH, group=0))


def rows_lost(loop: Loop) -> Planted:
    """A slice that is shorter than the batch."""
    step, _ = loop.until(lambda step: len(step.requests) > 1 or None)
    step = _with_table(step, 0, step.block_tables[0][: len(step.requests) - 1])
    return Planted(step, Expected(FaultKind.ROWS, group=0))


def more_rows_than_planned(loop: Loop) -> Planted:
    """Each prefill becomes two rows, a head and a tail."""
    step = loop.engine.step()
    rows = loop.engine.limits.max_num_reqs
    table = torch.zeros(2 * rows, step.block_tables[0].shape[1], dtype=torch.int32)
    return Planted(_with_table(step, 0, table), Expected(FaultKind.ROWS, group=0))


def transposed_table(loop: Loop) -> Planted:
    """A copy that assumed contiguous rows."""
    step, _ = loop.until(lambda step: step.block_tables[0].shape[0] > 1 or None)
    step = _with_table(step, 0, step.block_tables[0].t().contiguous().t())
    return Planted(step, Expected(FaultKind.STRIDE, group=0))


def moved_storage(loop: Loop) -> Planted:
    """The storage was resized, and a captured graph still reads the old one."""
    loop.after(lambda step: len(step.requests) > 0 or None)
    step, _ = loop.until(lambda step: len(step.requests) > 0 or None)
    step = _with_table(step, 1, step.block_tables[1].clone())
    return Planted(step, Expected(FaultKind.ADDRESS, group=1))


def narrow_slots(loop: Loop) -> Planted:
    """Slots kept in 32 bits."""
    step = loop.engine.step()
    step = replace(step, slot_mappings=step.slot_mappings.int())
    return Planted(step, Expected(FaultKind.DTYPE, group=0))


def too_many_slots(loop: Loop) -> Planted:
    """A padded count above what the step's buffers hold."""
    step = loop.engine.step()
    slots = torch.full((len(loop.layouts), loop.engine.limits.max_num_batched_tokens + 8), -1)
    return Planted(replace(step, slot_mappings=slots), Expected(FaultKind.SLOT_COUNT, group=0))


def falling_starts(loop: Loop) -> Planted:
    """Cumulative lengths that do not rise."""
    step, row = loop.until(
        lambda step: next((row for row in rows_of(step)[1:] if tokens_of(step, row - 1)), None)
    )
    step.query_start_loc[row] = -1
    return Planted(step, Expected(FaultKind.QUERY_START, row=row))


def more_tokens_than_slots(loop: Loop) -> Planted:
    """A slot buffer with room for fewer drafts than the step has."""
    step, _ = loop.until(lambda step: step.num_tokens > 1 or None)
    step = replace(step, slot_mappings=step.slot_mappings[:, : step.num_tokens - 1])
    return Planted(step, Expected(FaultKind.QUERY_START, row=len(step.requests)))


def drafts_past_the_end(loop: Loop) -> Planted:
    """A length that counts drafts for which no row has room."""
    step, _ = loop.until(lambda step: len(step.requests) > 0 or None)
    step.seq_lens[0] = loop.engine.limits.max_tokens + 2
    return Planted(step, Expected(FaultKind.LENGTH, group=0, row=0))


def length_of_the_wrong_half(loop: Loop) -> Planted:
    """A half batch with its own tables and the other half's lengths."""
    step, row = loop.until(
        lambda step: next((row for row in rows_of(step) if len(tokens_of(step, row)) > 2), None)
    )
    step.seq_lens[row] = len(tokens_of(step, row)) - 1
    return Planted(step, Expected(FaultKind.LENGTH, group=0, row=row))


def appended_to_a_full_row(loop: Loop) -> Planted:
    """The count is advanced although the row has no room."""
    step, _ = loop.until(lambda step: len(step.requests) > 0 or None)
    step.num_blocks_of_row[0, 1] = loop.layouts[1].blocks_per_row + 1
    return Planted(step, Expected(FaultKind.BLOCK_COUNT, group=1, row=0))


def state_row_divided_by_shards(loop: Loop) -> Planted:
    """A group that every rank keeps whole, sized as if it were spread over two."""
    step, row = loop.until(
        lambda step: next((r for r in rows_of(step) if int(step.num_blocks_of_row[r, 1]) > 3), None)
    )
    half = int(step.num_blocks_of_row[row, 1]) // 2
    step.num_blocks_of_row[row, 1] = half
    step.block_tables[1][row, half:] = 0
    return Planted(step, Expected(FaultKind.TOO_FEW_BLOCKS, group=1, row=row, column=half))
