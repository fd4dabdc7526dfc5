"""Promises 3 and 4: a token's slot is its own, in int64, or ``PAD_SLOT``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.executors import CheckedExecutor, InterpretedExecutor
from tests.support.poison import POISON, misaligned
from tests.support.tables import (
    batch_of,
    on_device,
    on_reference_and_kernel,
    plan_groups,
    slots_of_row,
)

from bt_tables import MultiGroupBlockTable, StagedBlockTables, StepBatch
from bt_tables.devices import Executor
from bt_width import (
    PAD_SLOT,
    AttentionSpec,
    BlockTableLayout,
    ContextParallel,
    InvalidEditError,
    MambaSpec,
    RingSpec,
    ServingLimits,
    WidthMismatchError,
)

pytestmark = pytest.mark.fast

ExecutorClass = Callable[[], Executor]
LIMITS = ServingLimits(max_model_len=8192, max_num_reqs=4, max_num_batched_tokens=300)


def sharded_limits(size: int, rank: int, interleave: int) -> ServingLimits:
    context = ContextParallel(size=size, rank=rank, interleave=interleave)
    return ServingLimits(
        max_model_len=1024, max_num_reqs=4, max_num_batched_tokens=1024, context_parallel=context
    )


@on_reference_and_kernel
@pytest.mark.parametrize(
    "block_size",
    [
        pytest.param(size, id=f"block-of-{size}")
        for size in (48, 96, 528, 544, 640, 784, 1056, 1152, 1600)
    ],
)
def test_block_sizes_need_not_be_powers_of_two(
    block_size: int, executor_class: ExecutorClass
) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/31380
    and https://github.com/vllm-project/vllm/pull/35923
    and https://github.com/InternLM/lmdeploy/issues/3781
    """
    layouts = plan_groups(
        LIMITS, AttentionSpec(block_size=block_size), (AttentionSpec(block_size=block_size), 16)
    )
    ids = list(range(5, 5 + layouts[0].num_blocks(LIMITS.max_model_len)))
    edge = block_size
    positions = [0, edge - 1, edge, edge + 1, 2 * edge - 1, 2 * edge, 8191]

    found = slots_of_row(layouts, [ids, ids], positions, executor_class)

    expected = [layouts[0].slot(position, ids) for position in positions]
    assert found == [expected, expected]


def test_published_values() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/31380
    and https://github.com/vllm-project/vllm/pull/35923
    and https://github.com/InternLM/lmdeploy/issues/3781
    """
    layouts = plan_groups(LIMITS, AttentionSpec(block_size=48))

    assert slots_of_row(layouts, [[5, 9]], [47, 48]) == [[287, 432]]


@pytest.mark.parametrize(
    "block_size", [pytest.param(size, id=f"block-of-{size}") for size in (1, 16, 64, 256)]
)
def test_a_position_is_no_column(block_size: int) -> None:
    """Reported as https://github.com/ROCm/aiter/pull/4440
    and https://github.com/sgl-project/sglang/pull/38187
    and https://github.com/sgl-project/sglang/pull/31218
    """
    layouts = plan_groups(LIMITS, AttentionSpec(block_size=block_size))
    ids = list(range(1, 1 + layouts[0].num_blocks(301)))

    (found,) = slots_of_row(layouts, [ids], [300])

    assert found == [ids[300 // block_size] * block_size + 300 % block_size]


@on_reference_and_kernel
def test_ownership_is_decided_in_blocks_not_kernel_blocks(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/51031"""
    owned, found = [], {200: [], 600: []}  # type: tuple[list[int], dict[int, list[int]]]
    for rank in range(4):
        spec = AttentionSpec(block_size=128)
        layouts = plan_groups(sharded_limits(4, rank, 128), (spec, 64))
        (slots,) = slots_of_row(layouts, [[7, 3]], range(1024), executor_class)
        owned.append(sum(slot != PAD_SLOT for slot in slots))
        for position, of_rank in found.items():
            of_rank.append(slots[position])

    assert found == {200: [-1, 968, -1, -1], 600: [472, -1, -1, -1]}
    assert owned == [256] * 4


@on_reference_and_kernel
def test_interleaved_runs_of_tokens(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/26696"""

    def slots(rank: int, interleave: int, num_tokens: int) -> list[int]:
        layouts = plan_groups(sharded_limits(2, rank, interleave), AttentionSpec(block_size=4))
        return slots_of_row(layouts, [[6, 9]], range(num_tokens), executor_class)[0]

    first, second = slots(0, 2, 16), slots(1, 2, 16)
    assert first == [24, 25, -1, -1, 26, 27, -1, -1, 36, 37, -1, -1, 38, 39, -1, -1]
    assert second == [-1, -1, 24, 25, -1, -1, 26, 27, -1, -1, 36, 37, -1, -1, 38, 39]
    assert slots(1, 1, 8) == [-1, 24, -1, 25, -1, 26, -1, 27]


def test_replicated_groups_keep_every_token_and_sharded_ones_share_them() -> None:
    """Reported as https://github.com/vllm-project/vllm-ascend/issues/14320
    and https://github.com/vllm-project/vllm-ascend/pull/14402
    and https://github.com/vllm-project/vllm-ascend/pull/16327
    """
    by_rank = []
    for rank in range(8):
        layouts = plan_groups(
            sharded_limits(8, rank, 1),
            AttentionSpec(block_size=16, sharded=False),
            AttentionSpec(block_size=16),
        )
        ids = list(range(1, 65))
        by_rank.append(slots_of_row(layouts, [ids, ids[:8]], range(1024)))

    replicated = [slots[0] for slots in by_rank]
    owners = np.sum([np.array(slots[1]) != PAD_SLOT for slots in by_rank], axis=0)
    assert replicated == [replicated[0]] * 8
    assert min(replicated[0]) >= 0
    assert (owners == 1).all()


@on_reference_and_kernel
def test_a_column_past_the_width_is_padding_not_the_neighbours_block(
    executor_class: ExecutorClass,
) -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/53982
    and https://github.com/vllm-project/vllm/pull/54296
    """
    limits = ServingLimits(max_model_len=16, max_num_reqs=2, max_num_batched_tokens=8)
    layouts = plan_groups(limits, AttentionSpec(block_size=16, token_alignment=None))
    tables = StagedBlockTables(layouts, device=executor_class())
    tables.append_block_ids(0, [[5]])
    tables.append_block_ids(1, [[9]])

    slots = tables.step(batch_of([0, 1], [[0, 16], []])).slot_mappings

    assert layouts[0].width == 1
    assert slots.tolist() == [[80, -1]]


@on_reference_and_kernel
def test_no_position_leads_out_of_the_row(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/53982
    and https://github.com/vllm-project/vllm/pull/54296
    """
    limits = ServingLimits(max_model_len=4, max_num_reqs=2, max_num_batched_tokens=8)
    layouts = plan_groups(limits, AttentionSpec(block_size=4))
    tables = StagedBlockTables(layouts, device=executor_class())
    tables.append_block_ids(0, [[7]])
    tables.append_block_ids(1, [list(range(1, 33))])

    slots = tables.step(batch_of([0], [[0, 3, 130, 8192, 1_048_575]])).slot_mappings

    assert slots.tolist() == [[28, 31, -1, -1, -1]]


@on_reference_and_kernel
def test_a_ring_is_written_round_and_round(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/57317
    and https://github.com/vllm-project/vllm/pull/53906
    """
    limits = ServingLimits(max_model_len=500_000, max_num_reqs=1, max_num_batched_tokens=1024)
    layouts = plan_groups(limits, RingSpec(block_size=4))
    assert layouts[0].slot_mode == "ring"

    (slots,) = slots_of_row(layouts, [[13]], range(1388, 1392), executor_class)
    (late,) = slots_of_row(layouts, [[13]], range(499_000, 500_000), executor_class)

    assert slots == [52, 53, 54, 55]
    assert set(late) == {52, 53, 54, 55}


@on_reference_and_kernel
def test_a_group_without_slots_has_only_padding(executor_class: ExecutorClass) -> None:
    layouts = plan_groups(LIMITS, MambaSpec(block_size=16), AttentionSpec(block_size=16))

    assert slots_of_row(layouts, [[3], [4]], [0, 1], executor_class) == [[-1, -1], [64, 65]]


@on_reference_and_kernel
def test_padding_requests_read_nothing_and_have_no_slots(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/56734"""
    tables = StagedBlockTables(
        plan_groups(LIMITS, AttentionSpec(block_size=16)), device=executor_class()
    )
    tables.append_block_ids(0, [[5]])
    tables.append_block_ids(3, [[6]])

    slots = tables.step(batch_of([-1, -1], [[0, 5], [1, 2**40]])).slot_mappings

    assert slots.tolist() == [[-1, -1, -1, -1]]


@on_reference_and_kernel
@pytest.mark.parametrize(
    "position",
    [
        pytest.param(-1, id="negative"),
        pytest.param(-(2**31) - 3, id="below-int32"),
        pytest.param(2**31, id="past-int32"),
        pytest.param(2**32 + 5, id="wraps-to-five"),
        pytest.param(16, id="null-column"),
        pytest.param(32, id="past-the-blocks"),
    ],
)
def test_a_position_without_a_place_is_padding(
    position: int, executor_class: ExecutorClass
) -> None:
    layouts = plan_groups(LIMITS, AttentionSpec(block_size=16))

    assert slots_of_row(layouts, [[5, 0]], [3, position], executor_class) == [[83, -1]]


@on_reference_and_kernel
def test_slots_past_int32_are_exact(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/1486"""
    limits = ServingLimits(max_model_len=4096, max_num_reqs=1, max_num_batched_tokens=4)
    layouts = plan_groups(
        limits, AttentionSpec(block_size=4096), (AttentionSpec(block_size=4096), 2048)
    )
    ids = [[2**20], [2**30 - 1]]

    found = slots_of_row(layouts, ids, [1, 4095], executor_class)

    assert found[0] == [2**32 + 1, 2**32 + 4095]
    assert found[1] == [(2**30 - 1) * 4096 + 1, (2**30 - 1) * 4096 + 4095]


@on_reference_and_kernel
def test_slots_past_the_real_tokens_are_padding_to_the_end(executor_class: ExecutorClass) -> None:
    tables = StagedBlockTables(
        plan_groups(LIMITS, AttentionSpec(block_size=16)), device=executor_class()
    )
    tables.append_block_ids(0, [list(range(1, 20))])
    tables.step(batch_of([0], [range(300)]))

    tables.step(batch_of([0], [[7]], num_tokens_padded=5))

    whole = tables.dummy_slot_mappings(0)
    assert whole.shape == (1, 0)
    everything = tables._storage.slot_mappings(300)
    assert (everything == PAD_SLOT).all()


@on_reference_and_kernel
def test_tokens_past_the_padded_count_are_not_mapped(executor_class: ExecutorClass) -> None:
    """Starts on the device are not read by the host: the kernel ends where the slots do."""
    tables = StagedBlockTables(
        plan_groups(LIMITS, AttentionSpec(block_size=16)), device=executor_class()
    )
    tables.append_block_ids(0, [[1]])
    batch = batch_of([0], [range(6)], num_tokens_padded=4)

    tables.step(batch._replace(query_start_loc=on_device(batch.query_start_loc)))

    everything = tables._storage.slot_mappings(8)
    assert everything.tolist() == [[16, 17, 18, 19, -1, -1, -1, -1]]
    with pytest.raises(InvalidEditError, match="num_tokens_padded is 4, which is less than the 6"):
        tables.step(batch)


@on_reference_and_kernel
def test_tokens_past_the_positions_are_not_mapped(executor_class: ExecutorClass) -> None:
    """Where the starts are on the device, positions bound what may be read."""
    tables = StagedBlockTables(
        plan_groups(LIMITS, AttentionSpec(block_size=16)), device=executor_class()
    )
    tables.append_block_ids(0, [[1]])
    behind = torch.full((9,), 7)
    behind[:3] = torch.arange(3)

    slots = tables.step(
        StepBatch(
            np.zeros(1, np.int32),
            on_device(np.array([0, 8], np.int32)),
            on_device(behind[:3]),
            1,
            8,
        )
    ).slot_mappings

    assert slots.tolist() == [[16, 17, 18, -1, -1, -1, -1, -1]]


@on_reference_and_kernel
def test_tokens_past_the_positions_are_padding_where_an_earlier_step_had_slots(
    executor_class: ExecutorClass,
) -> None:
    """Slots of the earlier step are written anew, and none of them from what lies behind."""
    tables = StagedBlockTables(
        plan_groups(LIMITS, AttentionSpec(block_size=16)), device=executor_class()
    )
    tables.append_block_ids(0, [[1]])
    tables.step(batch_of([0], [range(8)]))
    behind = torch.full((9,), 7)
    behind[:3] = torch.arange(3)

    starts = on_device(np.array([0, 8], np.int32))
    slots = tables.step(
        StepBatch(np.zeros(1, np.int32), starts, on_device(behind[:3]), 1, 8)
    ).slot_mappings

    assert slots.tolist() == [[16, 17, 18, -1, -1, -1, -1, -1]]


def four_rows(executor: Executor) -> StagedBlockTables:
    """Rows 0 to 3 with blocks 1, 11, 21 and 31 of 16 tokens."""
    tables = StagedBlockTables(plan_groups(LIMITS, AttentionSpec(block_size=16)), device=executor)
    for row in range(4):
        tables.append_block_ids(row, [[1 + 10 * row]])
    return tables


@on_reference_and_kernel
@pytest.mark.parametrize("end", [2, 40, 2**31 - 1])
@pytest.mark.parametrize("place", [np.asarray, on_device], ids=["host", "device"])
def test_an_empty_batch_has_no_tokens_whatever_its_starts_say(
    place: Callable[[object], Any], end: int, executor_class: ExecutorClass
) -> None:
    tables = four_rows(executor_class())
    positions = place(np.zeros(64, np.int64))
    batch = StepBatch(np.empty(0, np.int32), place(np.array([end], np.int32)), positions, 0, 64)
    whole = tables.dummy_slot_mappings(64)
    tables.step(batch_of([0], [range(16)]))

    assert tables.step(batch).slot_mappings.tolist() == [[PAD_SLOT] * 64]
    assert tables.compute_slot_mappings(*batch[:3], 64).tolist() == [[PAD_SLOT] * 64]
    assert (whole == PAD_SLOT).all()


@on_reference_and_kernel
def test_tokens_before_the_first_start_get_no_slot(executor_class: ExecutorClass) -> None:
    tables = four_rows(executor_class())
    starts = np.array([3, 5, 8], np.int32)
    batch = StepBatch(np.array([2, 1], np.int32), starts, np.arange(8), 2, 8)

    with pytest.raises(InvalidEditError, match="begins with 3"):
        tables.step(batch)
    slots = tables.step(batch._replace(query_start_loc=on_device(starts))).slot_mappings

    assert slots.tolist() == [[-1, -1, -1, 339, 340, 181, 182, 183]]


@pytest.mark.parametrize(
    "starts",
    [
        [0, 5, 2, 4],
        [0, 7, 7, 3],
        [0, 2**31 - 1, 4, 6],
        [-5, 2, 4, 6],
        [0, -3, 2, 6],
        [-(2**31), 2**31 - 1, -1, 8],
        [6, 4, 2, 8],
        [0, 3, 3, 100],
        [0, 1, 2, -4],
    ],
    ids=str,
)
def test_starts_in_no_order_never_lead_out_of_the_batch(starts: list[int]) -> None:
    """Kernel and reference agree, and no token gets a slot of a row outside its batch."""
    rows = [3, 1, 2]
    found = []
    for executor_class in (CheckedExecutor, InterpretedExecutor):
        tables = four_rows(executor_class())
        batch = StepBatch(
            np.array(rows, np.int32),
            on_device(np.array(starts, np.int32)),
            np.arange(8),
            3,
            8,
        )
        found.append(tables.step(batch).slot_mappings.tolist()[0])

    reference, kernel = found
    assert reference == kernel
    blocks = [-1 if slot < 0 else slot // 16 for slot in reference]
    assert set(blocks) <= {-1, *(1 + 10 * row for row in rows)}
    for token, block in enumerate(blocks):
        # a token that has a slot lies between its request's start and end
        if block >= 0:
            request = rows.index((block - 1) // 10)
            assert 0 <= starts[request] <= token < starts[request + 1]


def test_starts_that_fall_are_refused_on_the_host() -> None:
    tables = four_rows(CheckedExecutor())
    batch = StepBatch(
        np.array([0, 1, 2], np.int32), np.array([0, 5, 2, 4], np.int32), np.arange(5), 3, 5
    )

    with pytest.raises(InvalidEditError, match="falls from 5 to 2 at 2") as refused:
        tables.step(batch)

    assert refused.value.details == {"place": 2, "start": 2}


@on_reference_and_kernel
@pytest.mark.parametrize("place", [np.asarray, on_device], ids=["host", "device"])
def test_starts_padded_with_their_end_are_those_without(
    place: Callable[[object], Any], executor_class: ExecutorClass
) -> None:
    tables = four_rows(executor_class())
    batch = batch_of([2, 0, 1], [[0, 1], [], [3]], num_tokens_padded=5)
    expected = tables.step(batch).slot_mappings.tolist()
    padded = place(np.array([0, 2, 2, 3, 3, 3, 3], np.int32))

    found = tables.step(batch._replace(query_start_loc=padded)).slot_mappings.tolist()

    assert found == expected == [[336, 337, 179, -1, -1]]
    rows = batch.idx_mapping
    mapped = tables.compute_slot_mappings(rows, padded, batch.positions, 5)
    assert mapped.tolist() == expected


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"idx_mapping": [0]}, r"np\.array\(idx_mapping, dtype=np\.int32\)", id="rows"),
        pytest.param({"query_start_loc": [0, 1]}, "dtype=np.int32", id="starts"),
        pytest.param(
            {"positions": [0]}, r"np\.array\(positions, dtype=np\.int64\)", id="positions"
        ),
        pytest.param(
            {"idx_mapping": on_device(np.zeros(1, np.int32))},
            "idx_mapping must be on the host, .* would wait for the device",
            id="rows-on-the-device",
        ),
    ],
)
def test_lists_and_rows_on_the_device_are_refused_with_what_to_do(
    change: dict[str, Any], says: str
) -> None:
    tables = four_rows(CheckedExecutor())

    with pytest.raises(WidthMismatchError, match=says):
        tables.step(batch_of([0], [[0]])._replace(**change))


@on_reference_and_kernel
def test_guard_columns_change_no_result(executor_class: ExecutorClass) -> None:
    """Reported as https://github.com/vllm-project/vllm-ascend/pull/10112
    and https://github.com/vllm-project/vllm-ascend/pull/1297
    """
    limits = ServingLimits(max_model_len=64, max_num_reqs=2, max_num_batched_tokens=4)
    narrow = AttentionSpec(block_size=16, token_alignment=None)
    aligned = AttentionSpec(block_size=16, token_alignment=80)
    layouts = plan_groups(limits, narrow, aligned)
    tables = StagedBlockTables(layouts, device=executor_class())
    tables.append_block_ids(0, [[1, 2, 3, 4]] * 2)
    tables.append_block_ids(1, [[5, 6, 7, 8]] * 2)

    slots = tables.step(batch_of([0, 1], [[], [16]])).slot_mappings

    assert [layout.width for layout in layouts] == [4, 5]
    assert slots.tolist() == [[96], [96]]


def test_tokens_follow_the_batch_order_and_ids_are_what_was_handed_in() -> None:
    """Reported as https://github.com/NVIDIA/TensorRT-LLM/pull/12657
    and https://github.com/NVIDIA/TensorRT-LLM/pull/18259
    and https://github.com/NVIDIA/TensorRT-LLM/pull/13124
    """
    tables = StagedBlockTables(plan_groups(LIMITS, AttentionSpec(block_size=16)), device="cpu")
    for row, block in ((0, 50), (1, 60), (2, 70)):
        tables.append_block_ids(row, [[block]])

    found = tables.step(batch_of([2, 0, 1], [[0, 1, 2], [9], [4]]))

    assert found.block_tables[0][:, 0].tolist() == [70, 50, 60]
    assert found.slot_mappings.tolist() == [[1120, 1121, 1122, 809, 964]]


@on_reference_and_kernel
def test_views_that_start_anywhere_are_read_as_they_are(executor_class: ExecutorClass) -> None:
    layouts = plan_groups(LIMITS, AttentionSpec(block_size=16))
    tables = MultiGroupBlockTable(layouts, device=executor_class())
    tables.add_row([[5, 6]], 0)
    tables.commit(1)
    starts = misaligned(torch.tensor([0, 2], dtype=torch.int32))
    positions = misaligned(torch.tensor([1, 17]))

    assert tables.compute_slot_mappings(starts, positions, 2).tolist() == [[81, 97]]


def test_host_arrays_with_gaps_are_read_as_they_are() -> None:
    tables = StagedBlockTables(plan_groups(LIMITS, AttentionSpec(block_size=16)), device="cpu")
    spaced = np.full((6, 2), POISON, np.int32)
    spaced[:, 0] = [2, 5, 6, 0, 2, 0]
    rows, counts, ids = spaced[:1, 0], spaced[4:5, :1], spaced[1:3, 0]
    tables.stage(rows, counts, ids)
    positions = np.array([[3, POISON], [20, POISON]], np.int64)[:, 0]

    found = tables.step(
        StepBatch(rows, np.array([0, POISON, 2, POISON], np.int32)[::2], positions, 1, 2)
    )

    assert found.slot_mappings.tolist() == [[83, 100]]


@on_reference_and_kernel
def test_every_sharded_slot_equals_the_contract(executor_class: ExecutorClass) -> None:
    for rank in range(3):
        layouts = plan_groups(
            sharded_limits(3, rank, 4),
            (AttentionSpec(block_size=8), 4),
            AttentionSpec(block_size=8, sharded=False),
            RingSpec(block_size=5),
        )
        ids = [[9, 0, 4, 7], list(range(20, 40)), [3]]

        found = slots_of_row(layouts, ids, range(150), executor_class)

        assert found == [_contract(layout, held) for layout, held in zip(layouts, ids, strict=True)]


def _contract(layout: BlockTableLayout, ids: list[int]) -> list[int]:
    kernel_ids = layout.expand(ids)
    return [layout.slot(position, kernel_ids) for position in range(150)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        pytest.param([1, 2, 3], "begins with 1", id="late"),
        pytest.param([0, 2, 1], "falls from 2 to 1 at 2", id="falling"),
    ],
)
def test_starts_that_went_bad_in_place_are_refused(bad: list[int], message: str) -> None:
    """Starts that were checked in the last step are checked again when they have changed."""
    tables = four_rows(CheckedExecutor())
    batch = batch_of([0, 1], [[3], [4]])
    tables.step(batch)
    tables.step(batch)

    np.asarray(batch.query_start_loc)[:] = bad

    with pytest.raises(InvalidEditError, match=message):
        tables.step(batch)
