"""The sanitizer on a GPU: the compiled kernel says what the reference says on the CPU."""

import random
from dataclasses import replace

import pytest
import torch
from tests.support.small_engine import SmallStep
from tests.support.spoiled_steps import (
    HYBRID_POOLS,
    SHARING_POOLS,
    hybrid_layouts,
    plain_engine,
    sharing_layouts,
    spoil,
)

from bt_tables.sanitizer import BlockTableSanitizer, SanitizerReport
from bt_width import BlockTableLayout

pytestmark = pytest.mark.cuda

KINDS = [
    pytest.param(hybrid_layouts(), HYBRID_POOLS, id="hybrid"),
    pytest.param(sharing_layouts(size=2, rank=1), SHARING_POOLS, id="second-rank-of-two"),
]


def on_gpu(step: SmallStep) -> SmallStep:
    return replace(
        step,
        block_tables=tuple(table.cuda() for table in step.block_tables),
        slot_mappings=step.slot_mappings.cuda(),
        seq_lens=step.seq_lens.cuda(),
        query_start_loc=step.query_start_loc.cuda(),
        ref_counts=tuple(counts.cuda() for counts in step.ref_counts),
        ref_blocks=tuple(blocks.cuda() for blocks in step.ref_blocks),
    )


def check(sanitizer: BlockTableSanitizer, step: SmallStep, *, with_refs: bool) -> SanitizerReport:
    return sanitizer.check(
        step.block_tables,
        step.slot_mappings,
        step.seq_lens,
        step.query_start_loc,
        num_blocks_of_row=step.num_blocks_of_row,
        ref_counts=step.ref_counts if with_refs else None,
        ref_blocks=step.ref_blocks if with_refs else None,
    )


@pytest.mark.parametrize("with_refs", [True, False], ids=["counts", "no-counts"])
@pytest.mark.parametrize(("layouts", "pools"), KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_a_gpu_finds_what_a_cpu_finds(
    layouts: list[BlockTableLayout], pools: list[int], with_refs: bool, seed: int
) -> None:
    gpu, cpu = (
        BlockTableSanitizer(
            layouts, pools, mode="report", max_findings=100_000, fixed_addresses=False
        )
        for _ in range(2)
    )
    engine, draw = plain_engine(layouts, pools, seed), random.Random(seed)
    for number in range(60):
        sound = engine.step()
        step = sound if number % 3 else spoil(sound, draw)

        found = check(gpu, on_gpu(step), with_refs=with_refs)

        assert found == check(cpu, step, with_refs=with_refs)
        assert number % 3 == 0 or not found.num_faults


def test_a_sound_step_on_a_gpu_costs_one_launch() -> None:
    layouts = hybrid_layouts()
    sanitizer = BlockTableSanitizer(layouts, HYBRID_POOLS)
    step = on_gpu(plain_engine(layouts, HYBRID_POOLS, seed=3).step())
    step = replace(step, num_blocks_of_row=step.num_blocks_of_row.cuda())
    check(sanitizer, step, with_refs=True)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        check(sanitizer, step, with_refs=True)
        torch.cuda.synchronize()

    names = [event.key for event in profile.key_averages() if not event.key.startswith("Mem")]
    kernels = [name for name in names if "cuda" not in name.lower()]
    assert kernels == ["check_step_kernel"]
