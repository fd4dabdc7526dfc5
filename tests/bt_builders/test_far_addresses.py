"""Every product of a row and its stride is 64-bit, and so is a slot: rows in sparse memory."""

from __future__ import annotations

import pytest
import torch
from tests.support.addressings import rows, states
from tests.support.plain_builders import int32
from tests.support.sparse import sparse_zeros

from bt_builders import kernels, reference
from bt_builders.operations import (
    CommittedStates,
    DraftRows,
    ExpandedRows,
    MambaStates,
    Operations,
    StateBatch,
    TokenLens,
)

STRIDE = 2**29
LAST = 4
NUM_ROWS = LAST + 1

on_both = pytest.mark.parametrize(
    "operations", [pytest.param(reference, id="reference"), pytest.param(kernels, id="kernel")]
)


def far_rows(width: int) -> torch.Tensor:
    """Return rows [NUM_ROWS, width] int32 of which the last begins 2^31 elements on."""
    assert LAST * STRIDE >= 2**31
    memory = sparse_zeros(NUM_ROWS * STRIDE, torch.int32)
    return memory.view(NUM_ROWS, STRIDE)[:, :width]


def of_last(value: int, others: int = 0) -> torch.Tensor:
    return int32([others] * LAST + [value])


@on_both
def test_a_tokens_row_is_copied_past_2_to_31_ids(operations: Operations) -> None:
    """The last request's only token, to the last row of the expanded table."""
    addressing, ratio = rows(4, 16, 1, 1, 0, 1, 60)
    table, expanded = far_rows(4), far_rows(4)
    table[LAST] = int32([5, 6, 7, 8])
    starts = int32([0, 1, 2, 3, 4, 5])
    lens = TokenLens(*torch.zeros(2, NUM_ROWS, dtype=torch.int32))
    num_live = torch.zeros(NUM_ROWS, dtype=torch.int32)

    operations.expand_rows(
        addressing, ratio, starts, of_last(40), table, lens, ExpandedRows(expanded, num_live)
    )

    assert expanded.tolist() == [[0] * 4] * LAST + [[5, 6, 7, 0]]


@on_both
def test_a_drafts_slot_is_found_past_2_to_31_ids_and_slots(operations: Operations) -> None:
    addressing, ratio = rows(4, 16, 1, 1, 0, 1, 60)
    table = far_rows(4)
    table[LAST, 1] = 2**28
    lens = of_last(20)
    slots = torch.zeros(NUM_ROWS, dtype=torch.int64)
    drafts = DraftRows(lens, torch.zeros_like(lens), torch.zeros_like(slots), slots)

    operations.step_drafts(addressing, ratio, table, drafts, 0)

    assert slots.tolist() == [-1] * LAST + [2**32 + 3]


@on_both
def test_states_are_found_and_named_past_2_to_31_ids(operations: Operations) -> None:
    """Before the step, and copied after it: 30 tokens computed, 2 more, both accepted."""
    addressing = states(3, 16, 2)
    table = far_rows(3)
    table[LAST] = int32([11, 12, 13])
    batch = StateBatch(table, of_last(30), of_last(32), of_last(1, others=1))
    ids = far_rows(2)
    ints = torch.zeros(2, NUM_ROWS, dtype=torch.int32)
    flags = torch.zeros(2, NUM_ROWS, dtype=torch.bool)

    operations.state_ids(addressing, 0, batch, MambaStates(ints[0], ids, ints[1], *flags))

    assert ids.tolist() == [[0, 0]] * LAST + [[12, 13]]
    assert ints[0].tolist() == [0] * LAST + [12]

    copies = CommittedStates(far_rows(1), far_rows(1), ints[1])
    operations.commit_states(addressing, 0, batch, of_last(2, others=1), copies)

    assert copies.source_ids.tolist() == [[0]] * LAST + [[13]]
    assert copies.target_ids.tolist() == [[0]] * LAST + [[12]]
