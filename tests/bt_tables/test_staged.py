"""Promises of rows by request index: what edits, gathers and dummy batches leave behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.support.executors import CheckedExecutor
from tests.support.poison import POISON
from tests.support.tables import batch_of, columns, on_reference_and_kernel, plan_groups

from bt_tables import MultiGroupBlockTable, StagedBlockTables, StepBatch
from bt_tables._storage import Storage
from bt_tables.devices import CpuExecutor, Executor, StepLaunch
from bt_width import (
    PAD_SLOT,
    AttentionSpec,
    InvalidEditError,
    InvalidSpecError,
    MambaSpec,
    RowOverflowError,
    ServingLimits,
    SlidingWindowSpec,
    WidthMismatchError,
)

pytestmark = pytest.mark.fast

ExecutorClass = Callable[[], Executor]
LIMITS = ServingLimits(max_model_len=512, max_num_reqs=6, max_num_batched_tokens=64)
SPEC = AttentionSpec(block_size=16)


def one_group(executor: Executor | str = "cpu") -> StagedBlockTables:
    return StagedBlockTables(plan_groups(LIMITS, SPEC), device=executor)


@on_reference_and_kernel
def test_more_than_a_row_holds_is_refused_before_any_launch(
    executor_class: ExecutorClass,
) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/50287"""
    limits = ServingLimits(max_model_len=256, max_num_reqs=2, max_num_batched_tokens=8)
    narrow = AttentionSpec(block_size=16)
    wide = MambaSpec(block_size=8, mode="align")
    layouts = plan_groups(limits, narrow, wide)
    tables = StagedBlockTables(layouts, device=executor_class())
    seventeen = list(range(100, 117))

    with pytest.raises(RowOverflowError, match="row 0 holds 0 blocks in group 0 and gets 17"):
        tables.append_block_ids(0, [seventeen, seventeen])
    tables.append_block_ids(0, [[], seventeen])
    found = tables.gather_block_tables(np.array([0, 1], np.int32), 2)

    assert [layout.width for layout in layouts] == [16, 32]
    assert not found[0].any()
    assert columns(found[1], 0, 17) == seventeen
    assert not found[1][1].any()


def test_each_group_counts_in_its_own_blocks() -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/51163
    and https://github.com/vllm-project/vllm-ascend/issues/14479
    and https://github.com/LMCache/LMCache/issues/3571
    """
    sizes = [256, 64, 8, 4]
    layouts = plan_groups(LIMITS, *(AttentionSpec(block_size=size) for size in sizes))
    tables = StagedBlockTables(layouts, device="cpu")
    ids = [list(range(1, 1 + layout.num_blocks(500))) for layout in layouts]
    tables.append_block_ids(2, ids)

    found = tables.step(batch_of([2], [[499]]))

    assert [len(group) for group in ids] == [2, 8, 63, 125]
    expected = [
        [group[499 // size] * size + 499 % size] for group, size in zip(ids, sizes, strict=True)
    ]
    assert found.slot_mappings.tolist() == expected


@on_reference_and_kernel
def test_padding_is_null_in_tables_and_minus_one_in_slots(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/35431
    and https://github.com/vllm-project/vllm/pull/39064
    and https://github.com/vllm-project/vllm/pull/33937
    and https://github.com/vllm-project/vllm-gaudi/pull/951
    and https://github.com/ovg-project/kvcached/pull/398
    """
    tables = one_group(executor_class())
    tables.append_block_ids(0, [[5, 6]])
    tables.append_block_ids(1, [[7]])
    tables.step(batch_of([0, 1], [[1, 2, 3], [4, 5]]))

    found = tables.step(batch_of([1], [[4]], num_reqs_padded=4, num_tokens_padded=6))

    (table,) = found.block_tables
    assert columns(table, 0, 1) == [7]
    assert not table[1:].any()
    assert found.slot_mappings.tolist() == [[116, -1, -1, -1, -1, -1]]


def test_a_dummy_batch_after_a_request_left_reads_only_null_blocks() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/37728"""
    tables = StagedBlockTables(plan_groups(LIMITS, MambaSpec(block_size=16)), device="cpu")
    tables.append_block_ids(0, [[7]])
    tables.step(batch_of([0], [[0]]))
    tables.clear_row(0)

    (states,) = tables.dummy_block_tables(4)

    assert states[:, 0].tolist() == [0, 0, 0, 0]


@on_reference_and_kernel
def test_a_nulled_prefix_is_null_at_once_and_stays_so(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/42273
    and https://github.com/vllm-project/vllm/pull/42276
    and https://github.com/NVIDIA/TensorRT-LLM/pull/6768
    """
    window = SlidingWindowSpec(block_size=32, window=128)
    layouts = plan_groups(LIMITS, (window, 16))
    tables = StagedBlockTables(layouts, device=executor_class())
    tables.append_block_ids(0, [list(range(1, 9))])
    tables.step(batch_of([0]))

    tables.null_prefix(0, 0, 4)
    (table,) = tables.step(batch_of([0])).block_tables
    assert columns(table, 0, 16) == [0] * 8 + [10, 11, 12, 13, 14, 15, 16, 17]

    tables.append_block_ids(0, [[20]])
    tables.null_prefix(0, 0, 2)
    found = tables.step(batch_of([0], [[127, 128]]))
    assert columns(found.block_tables[0], 0, 18) == [0] * 8 + [
        10,
        11,
        12,
        13,
        14,
        15,
        16,
        17,
        40,
        41,
    ]
    assert found.slot_mappings.tolist() == [[PAD_SLOT, 160]]

    tables.append_block_ids(0, [[30]], overwrite=True)
    (table,) = tables.step(batch_of([0])).block_tables
    assert columns(table, 0, 2) == [60, 61]


def test_nulling_more_than_a_row_has_is_refused() -> None:
    tables = one_group()
    tables.append_block_ids(1, [[3, 4]])

    with pytest.raises(RowOverflowError, match="cannot null 3 blocks of row 1 in group 0"):
        tables.null_prefix(1, 0, 3)
    with pytest.raises(InvalidEditError):
        tables.null_prefix(1, 1, 1)
    with pytest.raises(InvalidEditError):
        tables.null_prefix(6, 0, 0)
    with pytest.raises(InvalidEditError):
        tables.null_prefix(1, 0, -1)


@on_reference_and_kernel
def test_a_phantom_row_of_a_smaller_batch_is_null(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/local-inference-lab/vllm/issues/621
    and https://github.com/sgl-project/sglang/pull/10892
    """
    tables = one_group(executor_class())
    for row in range(4):
        tables.append_block_ids(row, [[10 + row, 20 + row]])
    tables.step(batch_of([0, 1, 2, 3], [range(4)] * 4))

    found = tables.step(
        batch_of([0, 1, 2], [range(4)] * 3, num_reqs_padded=4, num_tokens_padded=16)
    )

    assert not found.block_tables[0][3].any()
    assert found.slot_mappings[0, 12:].tolist() == [PAD_SLOT] * 4


def test_ids_are_expanded_on_the_device() -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/42846
    and https://github.com/vllm-project/vllm/pull/42766
    and https://github.com/vllm-project/vllm/pull/28677
    """
    limits = ServingLimits(max_model_len=512, max_num_reqs=1, max_num_batched_tokens=8)
    tables = StagedBlockTables(
        plan_groups(limits, (AttentionSpec(block_size=128), 64)), device="cpu"
    )
    tables.append_block_ids(0, [[7, 3]])

    (table,) = tables.gather_block_tables(np.zeros(1, np.int32), 1)

    assert columns(table, 0, 4) == [14, 15, 6, 7]


@pytest.mark.parametrize("drafts", [pytest.param(k, id=f"{k}-drafts") for k in range(1, 7)])
def test_the_slot_buffer_has_exactly_the_limit(drafts: int) -> None:
    """Reported as https://github.com/vllm-project/vllm-ascend/issues/13710
    and https://github.com/vllm-project/vllm-ascend/pull/14024
    """
    most = 80 + 12 * (drafts - 1)
    limits = ServingLimits(
        max_model_len=64,
        max_num_reqs=12,
        max_num_batched_tokens=most,
        num_speculative_tokens=drafts,
    )
    tables = StagedBlockTables(plan_groups(limits, SPEC), device="cpu")

    assert tables.dummy_slot_mappings(most).shape == (1, most)
    with pytest.raises(InvalidEditError, match=f"num_tokens must be an int in 0..{most}, not"):
        tables.dummy_slot_mappings(most + 1)


def test_padded_counts_above_the_limits_are_refused() -> None:
    """Reported as https://github.com/vllm-project/vllm-ascend/pull/8170"""
    tables = one_group()
    tables.append_block_ids(0, [[1]])

    for bad in (
        batch_of([0], [[0]], num_tokens_padded=65),
        batch_of([0], [[0]], num_tokens_padded=-1),
        batch_of([0], [[0]], num_reqs_padded=7),
        batch_of([0, 0], [[0], []], num_reqs_padded=1),
    ):
        with pytest.raises(InvalidEditError):
            tables.step(bad)

    assert columns(tables.step(batch_of([0], [[0]])).block_tables[0], 0, 1) == [1]


@on_reference_and_kernel
def test_a_resumed_request_replaces_its_row(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/46595
    and https://github.com/LMCache/LMCache/pull/1361
    and https://github.com/RBLN-SW/vllm-rbln/pull/676
    """
    tables = one_group(executor_class())
    tables.append_block_ids(0, [[4, 5, 6]])
    tables.step(batch_of([0]))

    tables.append_block_ids(0, [[9]], overwrite=True)
    (table,) = tables.step(batch_of([0])).block_tables
    assert columns(table, 0, 1) == [9]

    tables.append_block_ids(0, [[]], overwrite=True)
    (table,) = tables.step(batch_of([0])).block_tables
    assert not table.any()


@on_reference_and_kernel
def test_edits_of_a_row_in_one_step_apply_in_order(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/44944"""
    layouts = plan_groups(LIMITS, SPEC, (SPEC, 4), MambaSpec(block_size=16))
    tables = StagedBlockTables(layouts, device=executor_class())
    tables.append_block_ids(3, [[1, 2, 3, 4, 5], [6], []])
    tables.append_block_ids(3, [[7], [8, 9], []], overwrite=True)
    tables.append_block_ids(3, [[10, 11], [], []])

    found = tables.step(batch_of([3], [[0, 16, 47, 48]]))

    assert columns(found.block_tables[0], 0, 3) == [7, 10, 11]
    assert columns(found.block_tables[1], 0, 8) == [32, 33, 34, 35, 36, 37, 38, 39]
    assert not found.block_tables[2].any()
    assert found.slot_mappings[0].tolist() == [112, 160, 191, PAD_SLOT]


@on_reference_and_kernel
def test_one_edit_may_bring_more_ids_than_a_tile(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/44944"""
    limits = ServingLimits(max_model_len=3000, max_num_reqs=1, max_num_batched_tokens=8)
    spec = AttentionSpec(block_size=2, token_alignment=None)
    layouts = plan_groups(limits, spec, (spec, 1))
    tables = StagedBlockTables(layouts, device=executor_class())
    ids = list(range(1, 1501))

    tables.append_block_ids(0, [ids, ids])
    plain, split = tables.step(batch_of([0])).block_tables

    assert plain[0].tolist() == ids
    assert split[0].tolist() == layouts[1].expand(ids)


def test_nothing_to_do_is_not_launched() -> None:
    executor = CheckedExecutor()
    tables = one_group(executor)

    tables.apply_staged_writes()
    tables.stage(np.empty(0, np.int32), np.empty((0, 1), np.int32), np.empty(0, np.int32))
    tables.step(batch_of([], num_reqs_padded=3, num_tokens_padded=5))
    tables.gather_block_tables(np.empty(0, np.int32), 0)
    tables.dummy_slot_mappings(4)

    assert executor.counts.launches == executor.counts.copies == 0


@pytest.mark.parametrize(
    ("layouts", "says"),
    [
        pytest.param([], "at least one", id="none"),
        pytest.param(
            plan_groups(LIMITS, SPEC)[0], r"hand over \[layout\]", id="a-layout-for-a-list"
        ),
        pytest.param(None, "must be a list of layouts", id="no-list"),
        pytest.param([SPEC], "the layout of group 0 must be a BlockTableLayout", id="a-spec"),
    ],
)
@pytest.mark.parametrize("tables_class", [StagedBlockTables, MultiGroupBlockTable])
def test_layouts_that_are_none_are_refused_in_a_sentence(
    tables_class: type[StagedBlockTables | MultiGroupBlockTable], layouts: Any, says: str
) -> None:
    with pytest.raises(InvalidSpecError, match=says) as refused:
        tables_class(layouts, device="cpu")

    assert len(str(refused.value)) < 200


@on_reference_and_kernel
def test_rebind_restores_numbers_and_nulls_what_is_no_block(
    executor_class: Callable[[], Executor],
) -> None:
    """Left and right of each row's blocks; the blocks themselves were kept by the memory."""
    limits = ServingLimits(max_model_len=64, max_num_reqs=3, max_num_batched_tokens=4)
    layouts = plan_groups(limits, (AttentionSpec(block_size=8), 4), AttentionSpec(block_size=16))
    tables = StagedBlockTables(layouts, device=executor_class())
    tables.append_block_ids(0, [[5, 6, 7], [3]])
    tables.append_block_ids(2, [[8], []])
    tables.null_prefix(0, 0, 1)
    tables.apply_staged_writes()
    storage = tables._storage
    storage.device_groups.fill_(-1)
    storage.batch.fill_(POISON)
    storage.slots.fill_(POISON)
    first, second = (storage.table(storage.rows, group) for group in (0, 1))
    first[0, :2] = first[0, 6:] = first[1] = first[2, 2:] = POISON
    second[0, 1:] = second[1:] = POISON

    tables.rebind()
    assert [columns(first, row, 6) for row in (1, 2)] == [[0] * 6, [16, 17, 0, 0, 0, 0]]
    assert columns(first, 0, 6) == [0, 0, 12, 13, 14, 15]
    assert [columns(second, row, 1) for row in (0, 1, 2)] == [[3], [0], [0]]
    found = tables.step(batch_of([0, 1, 2], [[9], [], []], num_tokens_padded=4))

    assert columns(found.block_tables[0], 0, 6) == [0, 0, 12, 13, 14, 15]
    assert columns(found.block_tables[0], 2, 2) == [16, 17]
    assert columns(found.block_tables[1], 0, 1) == [3]
    assert not found.block_tables[0][1].any()
    assert not found.block_tables[1][1:].any()
    assert found.slot_mappings.tolist() == [[49, -1, -1, -1], [57, -1, -1, -1]]
    tables.invalidate()
    tables.rebind()


def test_addresses_and_strides_never_change() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/35671
    and https://github.com/vllm-project/vllm/pull/34903
    """
    layouts = plan_groups(LIMITS, SPEC, (SPEC, 4))
    tables = StagedBlockTables(layouts, device="cpu")

    def seen(tensors: tuple[torch.Tensor, ...]) -> list[tuple[int, tuple[int, ...], int]]:
        return [(tensor.data_ptr(), tensor.stride(), tensor.shape[1]) for tensor in tensors]

    dummy_tables, dummy_slots = tables.dummy_block_tables(6), tables.dummy_slot_mappings(64)
    tables.append_block_ids(0, [list(range(1, 30)), list(range(1, 30))])
    grown = tables.step(batch_of([0, 1], [[1], []], num_reqs_padded=4, num_tokens_padded=64))
    tables.invalidate()
    tables.rebind()
    shrunk = tables.step(batch_of([1], [[]], num_reqs_padded=6, num_tokens_padded=64))

    assert seen(dummy_tables) == seen(grown.block_tables) == seen(shrunk.block_tables)
    assert dummy_slots.data_ptr() == grown.slot_mappings.data_ptr()
    assert dummy_slots.stride() == grown.slot_mappings.stride() == shrunk.slot_mappings.stride()
    assert all(row.is_contiguous() for row in grown.slot_mappings)


def test_every_table_starts_on_256_bytes() -> None:
    limits = ServingLimits(max_model_len=37, max_num_reqs=3, max_num_batched_tokens=5)
    spec = AttentionSpec(block_size=1, token_alignment=None)
    storage = StagedBlockTables(plan_groups(limits, spec, spec, spec), device="cpu")._storage

    for group in range(3):
        offset = storage.table(storage.batch, group).storage_offset()
        assert offset * storage.batch.element_size() % 256 == 0
        slots = storage.slot_mappings(5)[group]
        assert slots.storage_offset() * slots.element_size() % 256 == 0


@on_reference_and_kernel
def test_dummy_batches_leave_the_rows_of_requests_alone(executor_class: ExecutorClass) -> None:
    tables = one_group(executor_class())
    tables.append_block_ids(2, [[5, 6]])
    before = tables.step(batch_of([2], [[3]]))
    storage = tables._storage
    rows, expected = storage.rows.clone(), before.block_tables[0].clone()

    (dummy,) = tables.dummy_block_tables(6)
    dummy_slots = tables.dummy_slot_mappings(64)

    assert not dummy.any()
    assert (dummy_slots == PAD_SLOT).all()
    assert torch.equal(storage.rows, rows)
    assert torch.equal(tables.step(batch_of([2], [[3]])).block_tables[0], expected)


def test_a_refused_stage_changes_nothing_for_any_group() -> None:
    layouts = plan_groups(LIMITS, SPEC, SPEC)
    tables = StagedBlockTables(layouts, device="cpu", num_blocks=[100, 50])
    rows = np.array([0, 1], np.int32)
    counts = np.ones((2, 2), np.int32)
    good = np.array([99, 49, 1, 2], np.int32)
    bad_ids = [[99, 49, 1, 50], [100, 1, 1, 1], [-1, 1, 1, 1]]

    for ids in bad_ids:
        with pytest.raises(InvalidEditError, match="block id"):
            tables.stage(rows, counts, np.array(ids, np.int32))
        with pytest.raises(InvalidEditError, match="block id"):
            tables.append_block_ids(0, [ids[:1], ids[1:2]] if ids[0] != 99 else [[1], [50]])
    for bad_rows in ([0, 6], [-1, 0]):
        with pytest.raises(InvalidEditError, match="row"):
            tables.stage(np.array(bad_rows, np.int32), counts, good)
    with pytest.raises(InvalidEditError, match="not a count"):
        tables.stage(rows, np.array([[1, 1], [3, -1]], np.int32), good)
    tables.apply_staged_writes()
    assert not tables._storage.rows.any()

    tables.stage(rows, counts, good)
    first, second = tables.gather_block_tables(rows, 2)
    assert first[:, 0].tolist() == [99, 1]
    assert second[:, 0].tolist() == [49, 2]


def test_repeats_in_one_call_that_overflow_together_are_refused_together() -> None:
    tables = one_group()
    rows = np.array([0, 1, 0], np.int32)
    counts = np.array([[20], [1], [20]], np.int32)

    with pytest.raises(RowOverflowError):
        tables.stage(rows, counts, np.ones(41, np.int32))
    tables.apply_staged_writes()

    assert not tables._storage.rows.any()


@pytest.mark.parametrize(
    ("rows", "counts", "ids"),
    [
        pytest.param(
            np.zeros(1, np.int64), np.ones((1, 1), np.int32), np.ones(1, np.int32), id="rows-int64"
        ),
        pytest.param(
            np.zeros(1, np.int32), np.ones(1, np.int32), np.ones(1, np.int32), id="flat-counts"
        ),
        pytest.param(
            np.zeros(1, np.int32), np.ones((1, 2), np.int32), np.ones(2, np.int32), id="two-groups"
        ),
        pytest.param(
            np.zeros(1, np.int32),
            np.ones((1, 1), np.int32),
            np.ones(2, np.int32),
            id="an-id-too-many",
        ),
        pytest.param(np.zeros(1, np.int32), np.ones((1, 1), np.int32), np.ones(1), id="float-ids"),
        pytest.param([0], np.ones((1, 1), np.int32), np.ones(1, np.int32), id="a-list"),
        pytest.param(
            torch.zeros(1, dtype=torch.int32, device="meta"),
            np.ones((1, 1), np.int32),
            np.ones(1, np.int32),
            id="not-on-the-host",
        ),
    ],
)
def test_arrays_of_another_form_are_refused(
    rows: np.ndarray[tuple[int], np.dtype[np.int32]],
    counts: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    ids: np.ndarray[tuple[int], np.dtype[np.int32]],
) -> None:
    with pytest.raises(WidthMismatchError):
        one_group().stage(rows, counts, ids)


@pytest.mark.parametrize(
    "block_ids",
    [
        pytest.param([], id="no-group"),
        pytest.param([[1], [2]], id="two-groups"),
        pytest.param([[1.5]], id="float"),
        pytest.param([[True]], id="bool"),
        pytest.param([["1"]], id="text"),
        pytest.param([[2**40]], id="past-int32"),
        pytest.param([[2**70]], id="past-int64"),
        pytest.param([[2**63]], id="uint64"),
        pytest.param([[[1, 2]]], id="nested"),
        pytest.param([1], id="no-sequence"),
        pytest.param(5, id="an-int"),
    ],
)
def test_block_ids_that_are_none_are_refused(block_ids: list[list[int]]) -> None:
    with pytest.raises(InvalidEditError):
        one_group().append_block_ids(0, block_ids)


@pytest.mark.parametrize(
    "row", [pytest.param(bad, id=str(bad)) for bad in (-1, 6, True, 1.0, "0", None, 2**40)]
)
def test_rows_that_are_none_are_refused(row: int) -> None:
    tables = one_group()
    with pytest.raises(InvalidEditError):
        tables.append_block_ids(row, [[1]])
    with pytest.raises(InvalidEditError):
        tables.clear_row(row)
    with pytest.raises(InvalidEditError):
        tables.null_prefix(row, 0, 0)


def test_numpy_integers_are_rows_and_ids() -> None:
    tables = one_group()
    row: Any = np.int64(1)
    ids: Any = np.array([3, 4], np.int64)
    tables.append_block_ids(row, [ids])

    (table,) = tables.gather_block_tables(np.array([1], np.int32), 1)

    assert columns(table, 0, 2) == [3, 4]


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        pytest.param(batch_of([6]), InvalidEditError, id="row-past-the-table"),
        pytest.param(batch_of([-2]), InvalidEditError, id="below-padding"),
        pytest.param(
            batch_of([0])._replace(idx_mapping=np.zeros(1, np.int64)),
            WidthMismatchError,
            id="int64-rows",
        ),
        pytest.param(
            batch_of([0], [[1]])._replace(query_start_loc=np.zeros(2, np.int64)),
            WidthMismatchError,
            id="int64-starts",
        ),
        pytest.param(
            batch_of([0], [[1]])._replace(query_start_loc=np.array([0, 1, 2], np.int32)),
            WidthMismatchError,
            id="a-start-too-many",
        ),
        pytest.param(
            batch_of([0], [[1]])._replace(positions=np.zeros(1, np.int32)),
            WidthMismatchError,
            id="int32-positions",
        ),
        pytest.param(
            batch_of([0], [[1]])._replace(positions=np.zeros(0, np.int64)),
            InvalidEditError,
            id="a-position-missing",
        ),
        pytest.param(
            batch_of([0], [[1]])._replace(
                positions=torch.zeros(1, dtype=torch.int64, device="meta")
            ),
            WidthMismatchError,
            id="another-device",
        ),
    ],
)
def test_a_refused_batch_leaves_the_tables_as_they_were(
    batch: StepBatch, error: type[Exception]
) -> None:
    tables = one_group()
    tables.append_block_ids(0, [[3]])
    tables.step(batch_of([0], [[0]]))
    tables.append_block_ids(0, [[4]])
    seen = tables._storage.batch.clone()

    with pytest.raises(error):
        tables.step(batch)

    assert torch.equal(tables._storage.batch, seen)
    found = tables.step(batch_of([0], [[17]]))
    assert columns(found.block_tables[0], 0, 2) == [3, 4]
    assert found.slot_mappings.tolist() == [[65]]


def test_more_requests_than_rows_are_refused() -> None:
    tables = one_group()
    batch = batch_of([0] * 7)

    with pytest.raises(InvalidEditError, match="the number of requests"):
        tables.compute_slot_mappings(batch.idx_mapping, batch.query_start_loc, batch.positions, 0)
    for call in (
        lambda: tables.gather_block_tables(batch.idx_mapping, 7),
        lambda: tables.step(batch),
    ):
        with pytest.raises(InvalidEditError, match=r"the number of requests .* 0\.\.6, not 7"):
            call()


def test_layouts_of_different_limits_do_not_mix() -> None:
    other = ServingLimits(max_model_len=513, max_num_reqs=6, max_num_batched_tokens=64)

    with pytest.raises(InvalidSpecError, match="same limits"):
        StagedBlockTables([*plan_groups(LIMITS, SPEC), *plan_groups(other, SPEC)], device="cpu")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_steps_in_flight": 0}, id="no-step"),
        pytest.param({"max_steps_in_flight": True}, id="bool"),
        pytest.param({"num_blocks": [1, 2]}, id="two-pools"),
        pytest.param({"num_blocks": [0]}, id="no-block"),
        pytest.param({"num_blocks": ["9"]}, id="text"),
        pytest.param({"device": "meta"}, id="meta"),
        pytest.param({"device": "nowhere"}, id="no-device"),
    ],
)
def test_bad_arguments_of_the_tables_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpecError):
        StagedBlockTables(plan_groups(LIMITS, SPEC), **{"device": "cpu", **options})


def test_tables_hold_the_very_layouts() -> None:
    layouts = plan_groups(LIMITS, SPEC, SPEC)

    found = StagedBlockTables(layouts, device="cpu").layouts

    assert all(ours is theirs for ours, theirs in zip(found, layouts, strict=True))


def test_rebind_keeps_what_memory_kept_and_clears_the_rest() -> None:
    tables = one_group()
    tables.append_block_ids(0, [[5, 6, 7]])
    tables.null_prefix(0, 0, 1)
    tables.step(batch_of([0]))
    storage = tables._storage
    address = storage.device_groups.data_ptr()
    storage.device_groups.fill_(-1)
    storage.batch.fill_(123)
    storage.slots.fill_(123)
    storage.table(storage.rows, 0)[:, 3:] = 123
    storage.table(storage.rows, 0)[:, 0] = 123

    tables.rebind()
    tables.append_block_ids(0, [[8]])
    found = tables.step(batch_of([0], [[17, 48]], num_reqs_padded=6, num_tokens_padded=64))

    assert storage.device_groups.data_ptr() == address
    assert columns(found.block_tables[0], 0, 4) == [0, 6, 7, 8]
    assert not found.block_tables[0][1:].any()
    assert found.slot_mappings[0].tolist() == [97, 128] + [PAD_SLOT] * 62


class FailingExecutor(CheckedExecutor):
    """A device whose next launch can be told to fail, before or after it did its work."""

    fails: Literal["never", "before", "after"] = "never"

    def step_launch(self, storage: Storage) -> StepLaunch:
        inner = super().step_launch(storage)

        def launch(
            packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
        ) -> None:
            if self.fails == "before":
                raise RuntimeError("launch failed")
            inner(packet, starts, positions, programs)
            if self.fails == "after":
                raise RuntimeError("launch failed")

        return launch


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_launch_loses_no_edit(when: Literal["before", "after"]) -> None:
    executor = FailingExecutor()
    tables = one_group(executor)
    tables.append_block_ids(0, [[3]])
    tables.step(batch_of([0], [[1, 2]]))
    tables.append_block_ids(0, [[4]])
    tables.append_block_ids(1, [[9, 8, 7, 6, 5]])
    executor.fails = when

    with pytest.raises(RuntimeError, match="launch failed"):
        tables.step(batch_of([1, 0, 1], [range(5), [], [7]]))
    executor.fails = "never"
    found = tables.step(batch_of([0, 1], [[16], []], num_reqs_padded=6, num_tokens_padded=64))

    (table,) = found.block_tables
    assert columns(table, 0, 2) == [3, 4]
    assert columns(table, 1, 5) == [9, 8, 7, 6, 5]
    assert not table[2:].any()
    assert found.slot_mappings[0].tolist() == [64] + [PAD_SLOT] * 63


@on_reference_and_kernel
def test_every_place_of_a_row_follows_its_edits_without_a_gather(
    executor_class: ExecutorClass,
) -> None:
    """A row may be in the batch twice; what a step returned stays true for both."""
    tables = one_group(executor_class())
    tables.append_block_ids(4, [[7]])
    (table,) = tables.step(batch_of([2, 4, 4])).block_tables

    tables.append_block_ids(4, [[9]])
    tables.apply_staged_writes()

    assert [row[:3] for row in table.tolist()] == [[0, 0, 0], [7, 9, 0], [7, 9, 0]]
    tables.append_block_ids(4, [[3]])
    tables.compute_slot_mappings(*batch_of([4], [[0]])[:3], 1)
    assert [row[:4] for row in table.tolist()] == [[0, 0, 0, 0], [7, 9, 3, 0], [7, 9, 3, 0]]


def test_a_bad_id_among_many_is_named_with_its_row_group_and_pool() -> None:
    layouts = plan_groups(
        ServingLimits(max_model_len=512, max_num_reqs=200, max_num_batched_tokens=8), *[SPEC] * 3
    )
    tables = StagedBlockTables(layouts, device="cpu", num_blocks=[1000, 50, 1000])
    rows = np.arange(200, dtype=np.int32)[::-1].copy()
    counts = np.full((200, 3), 2, np.int32)
    ids = np.full(counts.sum(), 7, np.int32)
    ids[6 * 77 + 3] = 99

    with pytest.raises(InvalidEditError, match="row 122 gets block id 99 in group 1") as refused:
        tables.stage(rows, counts, ids)

    assert refused.value.details == {"row": 122, "group": 1, "id": 99, "max_id": 49}
    assert "0..49" in str(refused.value)


@pytest.mark.parametrize("ids", [[1, True], [True, 5], [False], [0, False], [np.True_, 2]], ids=str)
@pytest.mark.parametrize("padding", [0, 100], ids=["short", "long"])
def test_a_bool_among_ids_is_refused(ids: list[Any], padding: int) -> None:
    tables = StagedBlockTables(plan_groups(replace(LIMITS, max_model_len=4096), SPEC), device="cpu")
    held = [*range(2, 2 + padding), *ids]

    with pytest.raises(InvalidEditError, match="must be ints"):
        tables.append_block_ids(0, [held])
    with pytest.raises(InvalidEditError, match="must be ints"):
        tables.append_block_ids(0, [np.array(held, np.bool_)])  # type: ignore[list-item]  # no list

    assert tables.num_blocks(0, 0) == 0


def test_the_blocks_that_a_row_holds_are_known_before_a_launch() -> None:
    tables = StagedBlockTables(plan_groups(LIMITS, SPEC, SPEC), device="cpu")
    tables.append_block_ids(1, [[5, 6], [7]])
    tables.stage(
        np.array([1, 2], np.int32), np.array([[1, 0], [0, 2]], np.int32), np.ones(3, np.int32)
    )
    tables.append_block_ids(1, [[8], [9, 10]])
    tables.null_prefix(1, 0, 3)

    def held() -> list[list[int]]:
        return [[tables.num_blocks(row, group) for group in range(2)] for row in range(3)]

    assert held() == [[0, 0], [4, 3], [0, 2]]
    tables.apply_staged_writes()
    tables.clear_row(2)
    assert held() == [[0, 0], [4, 3], [0, 0]]
    for row, group in ((6, 0), (-1, 0), (0, 2), (True, 0)):
        with pytest.raises(InvalidEditError):
            tables.num_blocks(row, group)


def test_rows_can_be_looked_at_without_disturbing_the_batch() -> None:
    executor = CheckedExecutor()
    tables = one_group(executor)
    tables.append_block_ids(4, [[5, 6]])
    batch = batch_of([4], [[17]])
    tables.step(batch)
    tables.append_block_ids(4, [[7]])
    launches = executor.counts.launches

    shown = tables.rows(0)

    assert columns(shown, 4, 2) == [5, 6]
    assert shown.shape == (6, tables.layouts[0].width)
    assert executor.counts.launches == launches
    tables.step(batch)
    assert columns(shown, 4, 3) == [5, 6, 7]


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(replace(LIMITS, max_num_reqs=10**9), id="rows"),
        pytest.param(replace(LIMITS, max_num_batched_tokens=10**12), id="tokens"),
        pytest.param(replace(LIMITS, max_model_len=10**14), id="columns"),
    ],
)
@pytest.mark.parametrize("tables_class", [StagedBlockTables, MultiGroupBlockTable])
def test_tables_that_memory_cannot_hold_are_refused_before_any_is_taken(
    tables_class: type[StagedBlockTables | MultiGroupBlockTable], limits: ServingLimits
) -> None:
    executor = CheckedExecutor()

    with pytest.raises(InvalidSpecError, match=r"need [\d,]+ bytes on cpu.* lower one") as refused:
        tables_class(plan_groups(limits, SPEC), device=executor)

    assert executor.num_allocations == 0
    assert refused.value.details["max_num_reqs"] == limits.max_num_reqs


def test_memory_that_is_not_given_is_said_in_one_error() -> None:
    class Poor(CpuExecutor):
        def full(self, size: int, dtype: torch.dtype, value: int) -> torch.Tensor:
            raise RuntimeError("can't allocate memory")

    with pytest.raises(InvalidSpecError, match="lower one"):
        one_group(Poor())
