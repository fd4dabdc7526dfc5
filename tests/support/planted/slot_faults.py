"""Slots of other tokens, of other requests, of free blocks, and slots that are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.support.planted.loop import (
    Expected,
    Loop,
    Planted,
    position_of,
    rows_of,
    tokens_of,
)
from tests.support.small_engine import SmallStep

from bt_tables.sanitizer import FaultKind
from bt_width import PAD_SLOT


class Token(NamedTuple):
    """A real token of a step."""

    row: int
    token: int


def _token_with(
    condition: Callable[[SmallStep, Token], bool],
) -> Callable[[SmallStep], Token | None]:
    """Return a search for the first token of a step that has something."""
    return lambda step: next(
        (
            found
            for row in rows_of(step)
            for token in tokens_of(step, row)
            if condition(step, found := Token(row, token))
        ),
        None,
    )


def _row_and_column(loop: Loop, step: SmallStep, group: int, at: Token) -> tuple[list[int], int]:
    position = position_of(step, *at)
    ids = [int(value) for value in step.block_tables[group][at.row]]
    return ids, loop.layouts[group].locate(position).column


def map_of_another_layout(loop: Loop) -> Planted:
    """Tokens are mapped to requests by the batch before: the first request gets them all."""

    def is_shifted(step: SmallStep, at: Token) -> bool:
        _, column = _row_and_column(loop, step, 1, at)
        return at.row > 0 and bool(step.block_tables[1][0, column])

    step, at = loop.until(_token_with(is_shifted))
    ids = [int(value) for value in step.block_tables[1][0]]
    step.slot_mappings[1, at.token] = loop.layouts[1].slot(position_of(step, *at), ids)
    expected = Expected(FaultKind.NEIGHBOUR_SLOT, 1, at.row, token=at.token, other_owner=0)
    return Planted(step, expected)


def next_rows_block(loop: Loop) -> Planted:
    """A column past the row, which is the next row's first."""

    def next_row_has_ids(step: SmallStep, at: Token) -> bool:
        is_last = at.row + 1 >= len(step.requests)
        return not is_last and bool(step.block_tables[4][at.row + 1, 0])

    step, at = loop.until(_token_with(next_row_has_ids))
    block = int(step.block_tables[4][at.row + 1, 0])
    step.slot_mappings[4, at.token] = block * 4 + position_of(step, *at) % 4
    return Planted(
        step,
        Expected(FaultKind.NEIGHBOUR_SLOT, 4, at.row, token=at.token, other_owner=at.row + 1),
    )


def stride_taken_for_width(loop: Loop) -> Planted:
    """A flat look-up whose stride is one column off."""
    step, at = loop.until(
        _token_with(lambda step, at: at.row == 1 and _row_and_column(loop, step, 0, at)[1] > 0)
    )
    layout = loop.layouts[0]
    ids, column = _row_and_column(loop, step, 0, at)
    offset = position_of(step, *at) % layout.kernel_block_size
    step.slot_mappings[0, at.token] = ids[column - 1] * layout.kernel_block_size + offset
    return Planted(step, Expected(FaultKind.WRONG_SLOT, 0, at.row, column, token=at.token))


def masked_load_of_zero(loop: Loop) -> Planted:
    """A bound that turns a bad column into the null block."""
    step, at = loop.until(_token_with(lambda *_: True))
    step.slot_mappings[0, at.token] = position_of(step, *at) % 2
    return Planted(step, Expected(FaultKind.NULL_SLOT, 0, at.row, token=at.token))


def ring_through_the_block_formula(loop: Loop) -> Planted:
    """A ring's tokens are looked up by position, and those past its block are dropped."""
    step, at = loop.until(_token_with(lambda step, at: position_of(step, *at) >= 4))
    step.slot_mappings[4, at.token] = PAD_SLOT
    return Planted(step, Expected(FaultKind.MISSING_SLOT, 4, at.row, token=at.token))


def slots_not_padded(loop: Loop) -> Planted:
    """Slots above the real tokens are those of an earlier, longer step."""
    step, token = loop.until(
        lambda step: step.num_tokens if step.num_tokens < step.slot_mappings.shape[1] else None
    )
    step.slot_mappings[0, token] = 77
    return Planted(step, Expected(FaultKind.PADDING_SLOT, group=0, token=token))


def slots_padded_with_zero(loop: Loop) -> Planted:
    """The tables' padding value in a slot mapping."""
    step, token = loop.until(
        lambda step: step.num_tokens if step.num_tokens < step.slot_mappings.shape[1] else None
    )
    step.slot_mappings[3, token:] = 0
    return Planted(step, Expected(FaultKind.PADDING_SLOT, group=3, token=token))


def slot_of_a_group_without_slots(loop: Loop) -> Planted:
    """A state group's slots are computed as if it kept tokens."""
    step, at = loop.until(_token_with(lambda *_: True))
    step.slot_mappings[2, at.token] = 9
    return Planted(step, Expected(FaultKind.FOREIGN_TOKEN, 2, at.row, token=at.token))


def kernel_ids_times_the_block(loop: Loop) -> Planted:
    """Ids of kernel blocks multiplied by the manager's block size."""
    size, last = loop.layouts[0].block_size, loop.num_blocks[0]

    def is_past_the_pool(step: SmallStep, at: Token) -> bool:
        ids, column = _row_and_column(loop, step, 0, at)
        return ids[column] >= last

    step, at = loop.until(_token_with(is_past_the_pool))
    ids, column = _row_and_column(loop, step, 0, at)
    step.slot_mappings[0, at.token] = ids[column] * size
    return Planted(step, Expected(FaultKind.SLOT_OUT_OF_POOL, 0, at.row, column, token=at.token))


def draft_over_a_draft(loop: Loop) -> Planted:
    """Two draft tokens of a request get one position."""
    step, at = loop.until(_token_with(lambda step, at: at.token > tokens_of(step, at.row).start))
    step.slot_mappings[0, at.token] = step.slot_mappings[0, at.token - 1]
    return Planted(step, Expected(FaultKind.SLOT_TWICE, 0, at.row, token=at.token))


def shards_of_a_replicated_group(loop: Loop) -> Planted:
    """A group that every rank keeps whole gets the slots of one rank alone."""
    step, at = loop.until(_token_with(lambda step, at: position_of(step, *at) % 4 < 2))
    step.slot_mappings[1, at.token] = PAD_SLOT
    return Planted(step, Expected(FaultKind.MISSING_SLOT, 1, at.row, token=at.token))


def another_ranks_token(loop: Loop) -> Planted:
    """Ownership is decided in other units than the cache's."""
    step, at = loop.until(
        _token_with(lambda step, at: int(step.slot_mappings[0, at.token]) == PAD_SLOT)
    )
    step.slot_mappings[0, at.token] = int(step.block_tables[0][at.row, 0]) * 2
    return Planted(step, Expected(FaultKind.FOREIGN_TOKEN, 0, at.row, token=at.token))


def slot_that_wraps(loop: Loop) -> Planted:
    """An id times its block size in 32 bits."""
    step, at = loop.until(
        _token_with(lambda step, at: int(step.slot_mappings[0, at.token]) >= 2**31)
    )
    wrapped = (int(step.slot_mappings[0, at.token]) + 2**31) % 2**32 - 2**31
    step.slot_mappings[0, at.token] = wrapped
    kind = FaultKind.SLOT_OUT_OF_POOL if wrapped < 0 else FaultKind.NULL_SLOT
    return Planted(step, Expected(kind, 0, at.row, token=at.token))
