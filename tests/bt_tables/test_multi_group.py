"""Promises of rows in batch order: commits send what changed and leave no tail behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.executors import CheckedExecutor, Counts
from tests.support.tables import columns, on_device, on_reference_and_kernel, plan_groups

from bt_tables import MultiGroupBlockTable
from bt_tables.devices import Executor
from bt_width import (
    PAD_SLOT,
    AttentionSpec,
    InvalidEditError,
    MambaSpec,
    RowOverflowError,
    ServingLimits,
    WidthMismatchError,
)

pytestmark = pytest.mark.fast

ExecutorClass = Callable[[], Executor]
LIMITS = ServingLimits(max_model_len=256, max_num_reqs=4, max_num_batched_tokens=32)
SPEC = AttentionSpec(block_size=16)


def one_group(executor: Executor | str = "cpu") -> MultiGroupBlockTable:
    return MultiGroupBlockTable(plan_groups(LIMITS, SPEC), device=executor)


def test_edits_are_seen_after_a_commit_and_not_before() -> None:
    tables = one_group()
    table = tables.block_table(0)

    tables.append_row([[5, 6]], 1)
    assert not table.any()

    tables.commit(2)
    assert columns(table, 1, 2) == [5, 6]


@on_reference_and_kernel
def test_moves_and_swaps_leave_no_tail(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/47936
    and https://github.com/vllm-project/vllm-ascend/pull/17066
    """
    tables = one_group(executor_class())
    table = tables.block_table(0)
    tables.append_row([[1, 2, 3, 4, 5, 6]], 0)
    tables.append_row([[7, 8]], 1)
    tables.commit(2)

    tables.move_row(1, 0)
    tables.commit(2)
    assert columns(table, 0, 2) == [7, 8]
    assert not table[1].any()

    tables.append_row([[9, 10, 11]], 1)
    tables.swap_rows(0, 1)
    tables.commit(2)
    assert columns(table, 0, 3) == [9, 10, 11]
    assert columns(table, 1, 2) == [7, 8]


@on_reference_and_kernel
def test_rows_above_the_batch_are_null_and_come_back(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/47936
    and https://github.com/vllm-project/vllm-ascend/pull/17066
    """
    tables = one_group(executor_class())
    table = tables.block_table(0)
    for row in range(3):
        tables.append_row([[10 + row, 20 + row]], row)
    tables.commit(3)

    tables.commit(1)
    assert columns(table, 0, 2) == [10, 20]
    assert not table[1:].any()

    tables.append_row([[32]], 2)
    tables.clear_row(1)
    tables.commit(3)
    assert not table[1].any()
    assert columns(table, 2, 3) == [12, 22, 32]


def test_a_shorter_row_leaves_no_stale_column() -> None:
    """Reported as https://github.com/GeeeekExplorer/nano-vllm/pull/258"""
    limits = ServingLimits(max_model_len=4352, max_num_reqs=1, max_num_batched_tokens=8)
    tables = MultiGroupBlockTable(plan_groups(limits, AttentionSpec(block_size=256)), device="cpu")
    tables.add_row([list(range(1, 18))], 0)
    tables.commit(1)

    tables.add_row([list(range(1, 17))], 0)
    tables.commit(1)

    assert columns(tables.block_table(0), 0, 16) == list(range(1, 17))


def test_a_position_past_the_width_has_no_slot() -> None:
    """Reported as https://github.com/GeeeekExplorer/nano-vllm/pull/258"""
    limits = ServingLimits(max_model_len=4096, max_num_reqs=1, max_num_batched_tokens=8)
    tables = MultiGroupBlockTable(plan_groups(limits, AttentionSpec(block_size=256)), device="cpu")
    tables.add_row([list(range(1, 17))], 0)
    tables.commit(1)

    slots = tables.compute_slot_mappings(
        np.array([0, 2], np.int32), np.array([4095, 4096], np.int64), 2
    )

    assert slots.tolist() == [[16 * 256 + 255, PAD_SLOT]]
    with pytest.raises(RowOverflowError):
        tables.append_row([[17]], 0)


def test_a_commit_of_no_requests_nulls_every_row() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/37728"""
    tables = MultiGroupBlockTable(plan_groups(LIMITS, MambaSpec(block_size=16)), device="cpu")
    tables.append_row([[7]], 0)
    tables.commit(1)

    tables.commit(0)

    assert not tables.block_table(0).any()


def test_a_full_row_refuses_one_more_block_and_stays_as_it_was() -> None:
    tables = one_group()
    full = list(range(1, 17))
    tables.append_row([full], 0)

    with pytest.raises(RowOverflowError, match="holds 16 blocks in group 0 and gets 1 more"):
        tables.append_row([[99]], 0)
    with pytest.raises(RowOverflowError):
        tables.add_row([[*full, 99]], 0)
    tables.commit(1)

    assert columns(tables.block_table(0), 0, 16) == full


def test_a_refused_edit_changes_no_group() -> None:
    tables = MultiGroupBlockTable(
        plan_groups(LIMITS, SPEC, SPEC), device="cpu", num_blocks=[50, 10]
    )

    for ids in ([[1], [10]], [[-1], [1]], [[1]], [[1], [2], [3]]):
        with pytest.raises(InvalidEditError):
            tables.append_row(ids, 0)
        with pytest.raises(InvalidEditError):
            tables.add_row(ids, 0)
    for call in (tables.clear_row, lambda row: tables.move_row(0, row)):
        with pytest.raises(InvalidEditError):
            call(4)
    with pytest.raises(InvalidEditError):
        tables.commit(5)
    tables.commit(4)

    assert not tables.block_table(0).any()
    with pytest.raises(InvalidEditError):
        tables.block_table(2)


@on_reference_and_kernel
def test_a_nulled_prefix_moves_with_its_row(executor_class: ExecutorClass) -> None:
    tables = one_group(executor_class())
    tables.append_row([[1, 2, 3, 4]], 0)
    tables.commit(1)
    tables.null_prefix(0, 0, 2)
    tables.commit(1)
    assert columns(tables.block_table(0), 0, 4) == [0, 0, 3, 4]

    tables.move_row(0, 2)
    tables.append_row([[5]], 2)
    tables.commit(3)

    assert columns(tables.block_table(0), 2, 5) == [0, 0, 3, 4, 5]
    with pytest.raises(RowOverflowError):
        tables.null_prefix(0, 0, 1)


def test_moving_a_row_onto_itself_changes_nothing() -> None:
    tables = one_group()
    tables.append_row([[3]], 1)
    tables.move_row(1, 1)
    tables.swap_rows(1, 1)
    tables.commit(2)

    assert columns(tables.block_table(0), 1, 1) == [3]


def test_no_change_is_not_sent() -> None:
    executor = CheckedExecutor()
    tables = one_group(executor)
    tables.commit(4)
    tables.append_row([[]], 0)
    tables.compute_slot_mappings(np.zeros(1, np.int32), np.empty(0, np.int64), 9)

    assert executor.counts.launches == 0


def test_the_table_never_moves() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/35671
    and https://github.com/vllm-project/vllm/pull/34903
    """
    tables = one_group()
    first = tables.block_table(0)
    tables.append_row([list(range(1, 17))], 3)
    tables.commit(4)
    tables.rebind()
    tables.commit(1)

    second = tables.block_table(0)
    assert (first.data_ptr(), first.stride(), first.shape) == (
        second.data_ptr(),
        second.stride(),
        second.shape,
    )
    assert first.shape == (4, 16)


def test_rebind_shows_every_row_that_the_memory_kept_and_clears_the_rest() -> None:
    tables = one_group()
    tables.append_row([[5, 6]], 0)
    tables.append_row([[7]], 2)
    tables.commit(3)
    storage = tables._storage
    rows = storage.table(storage.rows, 0)
    rows[0, 2:] = rows[1] = rows[2, 1:] = rows[3] = 123
    storage.batch.fill_(123)
    storage.slots.fill_(123)
    storage.device_groups.fill_(-1)

    tables.rebind()
    tables.commit(3)
    slots = tables.compute_slot_mappings(np.array([0, 1], np.int32), np.array([17]), 4)

    table = tables.block_table(0)
    assert columns(table, 0, 2) == [5, 6]
    assert columns(table, 2, 1) == [7]
    assert not table[1].any()
    assert not table[3].any()
    assert slots.tolist() == [[97, PAD_SLOT, PAD_SLOT, PAD_SLOT]]


def test_several_edits_of_a_row_are_sent_once() -> None:
    executor = CheckedExecutor()
    tables = one_group(executor)
    tables.append_row([[1, 2, 3]], 0)
    tables.add_row([[4]], 0)
    tables.append_row([[5]], 0)
    tables.commit(1)

    # two in the row, and two in the batch row
    assert executor.counts.elements_written == 4
    assert torch.equal(tables.block_table(0)[0, :2], torch.tensor([4, 5], dtype=torch.int32))


def test_a_moved_row_takes_its_blocks_with_it_on_the_device() -> None:
    """A swap sends no id: two batch rows are copied, and nothing is written to rows."""
    executor = CheckedExecutor()
    tables = one_group(executor)
    tables.append_row([list(range(1, 17))], 0)
    tables.append_row([[21, 22]], 1)
    tables.commit(2)
    rows = tables._storage.rows.clone()
    executor.counts = Counts()

    tables.swap_rows(0, 1)
    tables.commit(2)

    assert columns(tables.block_table(0), 0, 2) == [21, 22]
    assert columns(tables.block_table(0), 1, 16) == list(range(1, 17))
    assert torch.equal(tables._storage.rows, rows)
    assert executor.counts.elements_written == 32
    assert executor.counts.bytes_sent == 1024


def test_slots_come_from_the_rows_as_last_committed() -> None:
    """An edit, a swap or a move since the commit shows in no slot before the next one."""
    tables = one_group()
    tables.append_row([[5]], 0)
    tables.append_row([[6]], 1)
    tables.commit(2)
    table = tables.block_table(0).clone()
    starts, positions = np.array([0, 1, 3], np.int32), np.array([0, 1, 16])

    tables.append_row([[7]], 1)
    tables.append_rows(
        np.array([0], np.int32), np.array([[1]], np.int32), np.array([8], np.int32), overwrite=True
    )
    tables.swap_rows(0, 1)
    tables.null_prefix(0, 0, 1)
    slots = tables.compute_slot_mappings(starts, positions, 3)

    assert slots.tolist() == [[80, 97, PAD_SLOT]]
    assert torch.equal(tables.block_table(0), table)
    tables.commit(2)
    assert tables.compute_slot_mappings(starts, positions, 3).tolist() == [
        [PAD_SLOT, 129, PAD_SLOT]
    ]
    assert columns(tables.block_table(0), 0, 2) == [0, 7]
    assert columns(tables.block_table(0), 1, 1) == [8]


def test_requests_above_the_last_commit_have_no_slots() -> None:
    tables = one_group()
    for row in range(3):
        tables.append_row([[5 + row]], row)
    tables.commit(1)

    slots = tables.compute_slot_mappings(np.array([0, 1, 2], np.int32), np.array([1, 1]), 2)

    assert slots.tolist() == [[81, PAD_SLOT]]


def four_rows(executor: Executor | str = "cpu") -> MultiGroupBlockTable:
    """Rows 0 to 3 with blocks 1, 11, 21 and 31 of 16 tokens."""
    tables = one_group(executor)
    for row in range(4):
        tables.append_row([[1 + 10 * row]], row)
    tables.commit(4)
    return tables


@on_reference_and_kernel
@pytest.mark.parametrize("end", [2, 40, 2**31 - 1])
@pytest.mark.parametrize("place", [np.asarray, on_device], ids=["host", "device"])
def test_starts_of_no_request_have_no_tokens(
    place: Callable[[object], Any], end: int, executor_class: ExecutorClass
) -> None:
    tables = four_rows(executor_class())
    positions = place(np.zeros(32, np.int64))
    starts = place(np.array([end], np.int32))

    assert tables.compute_slot_mappings(starts, positions, 32).tolist() == [[PAD_SLOT] * 32]


@on_reference_and_kernel
def test_starts_that_begin_late_or_fall_map_no_token_of_another_request(
    executor_class: ExecutorClass,
) -> None:
    """Refused on the host; on the device such tokens are padding."""
    tables = four_rows(executor_class())
    late, falling = np.array([3, 5, 8], np.int32), np.array([0, 5, 2, 4], np.int32)
    positions = np.arange(8)

    with pytest.raises(InvalidEditError, match="begins with 3"):
        tables.compute_slot_mappings(late, positions, 8)
    with pytest.raises(InvalidEditError, match="falls from 5 to 2 at 2"):
        tables.compute_slot_mappings(falling, positions, 8)

    found = tables.compute_slot_mappings(on_device(late), positions, 8)
    assert found.tolist() == [[-1, -1, -1, 19, 20, 181, 182, 183]]
    (slots,) = tables.compute_slot_mappings(on_device(falling), positions, 8).tolist()
    for token, slot in enumerate(slots):
        row = (slot // 16 - 1) // 10
        assert slot == PAD_SLOT or 0 <= falling[row] <= token < falling[row + 1]


@on_reference_and_kernel
@pytest.mark.parametrize("place", [np.asarray, on_device], ids=["host", "device"])
def test_starts_padded_with_their_end_are_those_without(
    place: Callable[[object], Any], executor_class: ExecutorClass
) -> None:
    tables = four_rows(executor_class())
    positions = np.array([0, 1, 3])

    found = tables.compute_slot_mappings(place(np.array([0, 2, 3, 3, 3], np.int32)), positions, 5)

    assert found.tolist() == [[16, 17, 179, -1, -1]]


@pytest.mark.parametrize(
    ("starts", "says"),
    [
        pytest.param([0, 1], r"hand over np\.array\(query_start_loc, dtype=np\.int32\)", id="list"),
        pytest.param(
            np.empty(0, np.int32), "must have 1 elements for 0 requests, not 0", id="empty"
        ),
        pytest.param(
            on_device(np.zeros(2, np.int64)), "must be a one-dimensional int32 tensor", id="long"
        ),
    ],
)
def test_starts_of_another_form_are_refused_with_what_to_do(starts: Any, says: str) -> None:
    with pytest.raises(WidthMismatchError, match=says):
        four_rows(CheckedExecutor()).compute_slot_mappings(starts, np.zeros(1, np.int64), 1)


@on_reference_and_kernel
def test_many_rows_get_their_blocks_from_arrays(executor_class: ExecutorClass) -> None:
    """In the order of the batch, wherever the rows lie; a row may repeat."""
    tables = MultiGroupBlockTable(plan_groups(LIMITS, SPEC, SPEC), device=executor_class())
    tables.append_row([[1], [2]], 0)
    tables.append_row([[3], [4]], 3)
    tables.swap_rows(0, 3)

    tables.append_rows(
        np.array([0, 2, 0], np.int32),
        np.array([[1, 0], [2, 1], [0, 2]], np.int32),
        np.array([5, 6, 7, 8, 9, 10], np.int32),
    )
    tables.commit(4)

    first, second = tables.block_table(0), tables.block_table(1)
    assert [columns(first, row, count) for row, count in ((0, 2), (2, 2), (3, 1))] == [
        [3, 5],
        [6, 7],
        [1],
    ]
    assert [columns(second, row, count) for row, count in ((0, 3), (2, 1), (3, 1))] == [
        [4, 9, 10],
        [8],
        [2],
    ]


def test_errors_name_rows_as_the_caller_does() -> None:
    tables = MultiGroupBlockTable(plan_groups(LIMITS, SPEC), device="cpu", num_blocks=[20])
    tables.append_row([[1]], 2)
    tables.swap_rows(2, 0)
    one, count = np.array([3, 0], np.int32), np.array([[0], [1]], np.int32)

    with pytest.raises(InvalidEditError, match="row 0 gets block id 20 in group 0"):
        tables.append_row([[20]], 0)
    with pytest.raises(InvalidEditError, match="row 0 gets block id 99 in group 0"):
        tables.append_rows(one, count, np.array([99], np.int32))
    with pytest.raises(RowOverflowError, match="row 0 holds 1 blocks in group 0 and gets 16"):
        tables.append_row([[1] * 16], 0)
    with pytest.raises(RowOverflowError, match="cannot null 2 blocks of row 0"):
        tables.null_prefix(0, 0, 2)
    with pytest.raises(InvalidEditError, match=r"src must be an int in 0\.\.3"):
        tables.move_row(4, 0)


def test_rows_and_their_blocks_can_be_looked_at_without_a_commit() -> None:
    tables = one_group()
    tables.append_row([[5, 6]], 0)
    tables.append_row([[7]], 3)
    tables.commit(1)
    tables.swap_rows(0, 3)
    tables.append_row([[8]], 0)

    shown = tables.rows(0)

    assert [tables.num_blocks(row, 0) for row in range(4)] == [2, 0, 0, 2]
    assert columns(shown, 0, 1) == [7]
    assert columns(shown, 3, 2) == [5, 6]
    assert columns(tables.block_table(0), 0, 2) == [5, 6]
