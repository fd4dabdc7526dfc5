"""The promises on a GPU: compiled kernels, pinned packets, events, streams and graphs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.support.poison import misaligned
from tests.support.random_steps import check_batch_order, check_staged
from tests.support.random_tables import random_layouts
from tests.support.tables import batch_of, columns, plan_groups

from bt_tables import MultiGroupBlockTable, StagedBlockTables, StepBatch
from bt_width import PAD_SLOT, AttentionSpec, MambaSpec, ServingLimits

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
LIMITS = ServingLimits(max_model_len=8192, max_num_reqs=8, max_num_batched_tokens=64)
SPEC = AttentionSpec(block_size=16)
SLEEP_CYCLES = 200_000_000


def on_device(batch: StepBatch, *, shift: bool) -> StepBatch:
    """The same batch with its starts and positions on the device, anywhere if shifted."""
    starts, positions = (
        torch.as_tensor(array).to(DEVICE) for array in (batch.query_start_loc, batch.positions)
    )
    if shift:
        starts, positions = misaligned(starts), misaligned(positions)
    return batch._replace(query_start_loc=starts, positions=positions)


def now_and_then_on_device(batch: StepBatch, step: int) -> StepBatch:
    return batch if step % 2 else on_device(batch, shift=step % 4 == 0)


@pytest.mark.parametrize("seed", range(12))
def test_staged_rows_equal_the_oracle_after_random_steps(seed: int) -> None:
    draw = random.Random(seed)
    check_staged(random_layouts(draw, max_num_reqs=9), DEVICE, draw, 40, now_and_then_on_device)


@pytest.mark.parametrize("seed", range(6))
def test_batch_order_rows_equal_the_oracle_after_random_commits(seed: int) -> None:
    draw = random.Random(seed)
    check_batch_order(random_layouts(draw, max_num_reqs=6), DEVICE, draw, 40)


def test_each_step_sees_its_own_ids_behind_a_blocked_stream() -> None:
    """Reported as https://github.com/NVIDIA/TensorRT-LLM/pull/15546
    and https://github.com/NVIDIA/TensorRT-LLM/pull/16088
    """
    tables = StagedBlockTables(plan_groups(LIMITS, SPEC), device=DEVICE)
    tables.warmup()
    snapshots = []
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]  # torch
    for first in (1, 101, 201, 301):
        tables.append_block_ids(0, [list(range(first, first + 8))], overwrite=True)
        (table,) = tables.step(batch_of([0], [[0]])).block_tables
        snapshots.append(table.clone())

    for first, seen in zip((1, 101, 201, 301), snapshots, strict=True):
        assert columns(seen.cpu(), 0, 8) == list(range(first, first + 8))


def test_a_step_past_the_depth_waits_for_the_device() -> None:
    tables = StagedBlockTables(plan_groups(LIMITS, SPEC), device=DEVICE, max_steps_in_flight=2)
    tables.warmup()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]  # torch
    blocked = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
    blocked.record()

    for step in range(2):
        tables.append_block_ids(0, [[step + 1]])
        tables.step(batch_of([0]))
    still_blocked = not blocked.query()  # type: ignore[no-untyped-call]  # torch
    tables.append_block_ids(0, [[3]])

    assert still_blocked
    assert blocked.query()  # type: ignore[no-untyped-call]  # torch


def test_packets_lie_in_pinned_memory() -> None:
    tables = StagedBlockTables(plan_groups(LIMITS, SPEC), device=DEVICE)

    assert all(packet._host.is_pinned() for packet in tables._rows._ring._packets)


def test_nothing_is_compiled_after_the_warmup() -> None:
    from bt_tables.kernels.fused_step import fused_step_kernel

    tables = StagedBlockTables(plan_groups(LIMITS, SPEC, MambaSpec(block_size=16)), device=DEVICE)
    tables.warmup()

    caches = getattr(fused_step_kernel, "device_caches")  # noqa: B009  # not in the protocol

    def compiled() -> int:
        return sum(len(cache[0]) for cache in caches.values())

    before = compiled()
    for step in range(60):
        rows = list(range(step % 8 + 1))
        tables.append_block_ids(step % 8, [[step + 1], []])
        batch = batch_of(rows, [range(step % 5)] * len(rows))
        tables.step(on_device(batch, shift=step % 2 == 0) if step % 3 else batch)

    assert compiled() == before


def test_a_graph_that_captured_the_tables_sees_later_steps() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/35671
    and https://github.com/vllm-project/vllm/pull/34903
    """
    tables = StagedBlockTables(plan_groups(LIMITS, SPEC), device=DEVICE)
    (table,) = tables.dummy_block_tables(4)
    slots = tables.dummy_slot_mappings(4)
    seen_table, seen_slots = torch.empty_like(table), torch.empty_like(slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen_table.copy_(table)
        seen_slots.copy_(slots)

    tables.append_block_ids(2, [[7, 8]])
    tables.step(batch_of([2], [[17]], num_reqs_padded=4, num_tokens_padded=4))
    graph.replay()

    assert columns(seen_table.cpu(), 0, 2) == [7, 8]
    assert not seen_table[1:].any()
    assert seen_slots.tolist() == [[129, PAD_SLOT, PAD_SLOT, PAD_SLOT]]


def test_compressed_rows_equal_the_references() -> None:
    layouts = plan_groups(LIMITS, (AttentionSpec(block_size=64), 16))
    found = []
    for device in (DEVICE, "cpu"):
        tables = MultiGroupBlockTable(layouts, device=device)
        for row in range(8):
            tables.add_row([[row * 100 + block for block in range(row * 9)]], row)
        tables.commit(8)
        lengths = np.array([row * 9 * 64 for row in range(8)], np.int32)
        found.append([*tables.gather_csr(0, lengths, 8), *tables.gather_token_csr(0, lengths, 8)])

    gpu, cpu = found
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(gpu, cpu, strict=True))


def test_a_large_prefill_with_many_decodes_equals_the_reference() -> None:
    limits = ServingLimits(max_model_len=131_072, max_num_reqs=256, max_num_batched_tokens=8448)
    layouts = plan_groups(limits, AttentionSpec(block_size=64), (AttentionSpec(block_size=128), 64))
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 900, (256, 2)).astype(np.int32)
    ids = rng.integers(0, 2**20, counts.sum()).astype(np.int32)
    positions = [range(8192), *([place] for place in rng.integers(0, 60_000, 255).tolist())]
    batch = batch_of(rng.permutation(256).tolist(), positions, num_tokens_padded=8448)
    found = []
    for device in (DEVICE, "cpu"):
        tables = StagedBlockTables(layouts, device=device)
        tables.stage(np.arange(256, dtype=np.int32), counts, ids)
        found.append(tables.step(batch))

    gpu, cpu = found
    for ours, theirs in zip(gpu.block_tables, cpu.block_tables, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert torch.equal(gpu.slot_mappings.cpu(), cpu.slot_mappings)


def test_rebind_on_the_device_restores_numbers_and_tails() -> None:
    tables = StagedBlockTables(plan_groups(LIMITS, SPEC), device=DEVICE)
    tables.append_block_ids(0, [[5, 6]])
    tables.step(batch_of([0]))
    storage = tables._storage
    storage.device_groups.fill_(-1)
    storage.batch.fill_(9)
    storage.slots.fill_(9)
    storage.table(storage.rows, 0)[:, 2:] = 9

    tables.rebind()
    found = tables.step(batch_of([0], [[17]], num_reqs_padded=8, num_tokens_padded=64))

    assert columns(found.block_tables[0].cpu(), 0, 2) == [5, 6]
    assert not found.block_tables[0][1:].any()
    assert found.slot_mappings[0].tolist() == [97] + [PAD_SLOT] * 63
