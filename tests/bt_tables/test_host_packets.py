"""Promise 6: a packet is written again only after the device has read it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from tests.support.executors import CheckedExecutor, LateExecutor
from tests.support.tables import batch_of, columns, plan_groups

from bt_tables import MultiGroupBlockTable, StagedBlockTables
from bt_tables._storage import Storage
from bt_tables.devices import StepLaunch
from bt_width import AttentionSpec, ServingLimits

pytestmark = pytest.mark.fast

LIMITS = ServingLimits(max_model_len=8192, max_num_reqs=3, max_num_batched_tokens=8)
SPEC = AttentionSpec(block_size=16)


def staged(executor: LateExecutor, depth: int = 2) -> StagedBlockTables:
    layouts = plan_groups(LIMITS, SPEC)
    return StagedBlockTables(layouts, device=executor, max_steps_in_flight=depth)


def run_steps(executor: LateExecutor, depth: int, steps: int) -> torch.Tensor:
    """Each step replaces the one row by eight ids of its own; return the table at the end."""
    tables = staged(executor, depth)
    for step in range(steps):
        tables.append_block_ids(0, [[100 * step + place for place in range(1, 9)]])
        (table,) = tables.step(batch_of([0], [[3]])).block_tables
    executor.catch_up()
    return table


def test_the_device_sees_the_ids_of_each_step_however_late_it_reads() -> None:
    """Reported as https://github.com/NVIDIA/TensorRT-LLM/pull/15546
    and https://github.com/NVIDIA/TensorRT-LLM/pull/16088
    """
    executor = LateExecutor()
    tables = staged(executor)
    snapshots: list[torch.Tensor] = []

    def keep(table: torch.Tensor) -> None:
        snapshots.append(table.clone())

    for step in (0, 100):
        tables.append_block_ids(0, [range(step + 1, step + 9)], overwrite=True)
        (table,) = tables.step(batch_of([0], [[0]])).block_tables
        executor.then(partial(keep, table))

    executor.catch_up()

    assert columns(snapshots[0], 0, 8) == list(range(1, 9))
    assert columns(snapshots[1], 0, 8) == list(range(101, 109))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_past_the_depth_waits_for_the_oldest(depth: int) -> None:
    executor = LateExecutor()

    run_steps(executor, depth, depth)
    assert executor.waits == 0
    run_steps(executor, depth, depth + 1)
    assert executor.waits == 1

    table = run_steps(LateExecutor(), depth, 7)
    assert columns(table, 0, 56) == [
        100 * step + place for step in range(7) for place in range(1, 9)
    ]


def test_without_fences_an_overwritten_packet_shows_as_a_wrong_table() -> None:
    table = run_steps(LateExecutor(fences_wait=False), 2, 7)

    expected = [100 * step + place for step in range(7) for place in range(1, 9)]
    assert table[0, :56].tolist() != expected


class WatchedExecutor(LateExecutor):
    """Says which copies read what was written after they were queued; its launches can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.is_torn: list[bool] = []
        self.fails = False

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        queued = source.clone()
        self.then(lambda: self.is_torn.append(not torch.equal(source, queued)))
        super().copy(destination, source)

    def step_launch(self, storage: Storage) -> StepLaunch:
        inner = super().step_launch(storage)

        def launch(
            packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
        ) -> None:
            inner(packet, starts, positions, programs)
            if self.fails:
                raise RuntimeError("launch failed")

        return launch


def test_a_packet_whose_launch_failed_is_read_before_it_is_written_again() -> None:
    executor = WatchedExecutor()
    tables = staged(executor)
    tables.append_block_ids(0, [[3, 4]])
    executor.fails = True
    with pytest.raises(RuntimeError, match="launch failed"):
        tables.step(batch_of([0], [[3]]))
    executor.fails = False

    tables.append_block_ids(0, [[5, 6]], overwrite=True)
    (table,) = tables.step(batch_of([1, 0])).block_tables
    executor.catch_up()

    assert executor.is_torn == [False, False]
    assert columns(table, 1, 2) == [5, 6]


def test_a_packet_that_grows_is_replaced_and_the_sent_one_still_read() -> None:
    executor = LateExecutor()
    limits = ServingLimits(max_model_len=200_000, max_num_reqs=3, max_num_batched_tokens=8)
    tables = StagedBlockTables(plan_groups(limits, AttentionSpec(block_size=16)), device=executor)
    tables.append_block_ids(0, [[1, 2]])
    tables.step(batch_of([0]))
    long = list(range(1, 12_001))

    tables.append_block_ids(1, [[7]])
    tables.append_block_ids(1, [long])
    tables.append_block_ids(2, [[5]])
    (table,) = tables.step(batch_of([0, 1, 2])).block_tables
    executor.catch_up()

    assert columns(table, 0, 2) == [1, 2]
    assert columns(table, 1, 12_001) == [7, *long]
    assert columns(table, 2, 1) == [5]


@pytest.mark.parametrize("num_ids", range(4200, 4360, 9))
def test_a_packet_nearly_full_of_ids_takes_the_tokens_too(num_ids: int) -> None:
    """Wherever it ends: before, within or behind the records and the batch."""
    executor = LateExecutor()
    limits = ServingLimits(max_model_len=2**17, max_num_reqs=3, max_num_batched_tokens=3)
    tables = StagedBlockTables(plan_groups(limits, AttentionSpec(block_size=16)), device=executor)

    tables.append_block_ids(0, [range(1, num_ids + 1)])
    tables.append_block_ids(1, [[7]])
    found = tables.step(batch_of([0, 1], [[0, 16 * num_ids - 1], [15]]))
    executor.catch_up()

    assert columns(found.block_tables[0], 0, num_ids) == list(range(1, num_ids + 1))
    assert found.slot_mappings.tolist() == [[16, 16 * num_ids + 15, 127]]


def test_a_packet_grows_by_doubling() -> None:
    """A thousand edits that do not fit cost a few larger packets, not one each."""
    executor = CheckedExecutor()
    limits = ServingLimits(max_model_len=2**20, max_num_reqs=3, max_num_batched_tokens=3)
    tables = StagedBlockTables(plan_groups(limits, AttentionSpec(block_size=16)), device=executor)
    before = executor.num_allocations

    count, ids = np.array([[100]], np.int32), np.arange(1, 101, dtype=np.int32)
    for row in range(1000):
        tables.stage(np.array([row % 3], np.int32), count, ids, overwrite=True)

    # both sides of a packet, from 4,352 ints to 139,264
    assert executor.num_allocations - before == 2 * 5


def test_commits_are_read_late_too() -> None:
    """Reported as https://github.com/NVIDIA/TensorRT-LLM/pull/15546
    and https://github.com/NVIDIA/TensorRT-LLM/pull/16088
    """
    executor = LateExecutor()
    tables = MultiGroupBlockTable(plan_groups(LIMITS, SPEC), device=executor)
    for step in range(6):
        tables.append_row([[10 * step + 1, 10 * step + 2]], 0)
        tables.commit(1)
    slots = tables.compute_slot_mappings(np.array([0, 1], np.int32), np.array([16]), 1)
    executor.catch_up()

    expected = [10 * step + place for step in range(6) for place in (1, 2)]
    assert columns(tables.block_table(0), 0, 12) == expected
    assert slots.tolist() == [[32]]


def test_the_caller_may_reuse_its_arrays_at_once() -> None:
    executor = LateExecutor()
    tables = staged(executor)
    rows, counts, ids = (
        np.zeros(1, np.int32),
        np.full((1, 1), 2, np.int32),
        np.array([5, 6], np.int32),
    )
    tables.stage(rows, counts, ids)
    batch = batch_of([0], [[17]])
    found = tables.step(batch)
    for array in (rows, counts, ids, batch.idx_mapping, batch.query_start_loc, batch.positions):
        array.fill(2)  # type: ignore[union-attr]  # all of them are NumPy's
    executor.catch_up()

    assert columns(found.block_tables[0], 0, 2) == [5, 6]
    assert found.slot_mappings.tolist() == [[97]]
