"""Steps of a small engine, and random damage to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from tests.support.plans import serving_limits
from tests.support.poison import POISON
from tests.support.small_engine import PlainTables, SmallEngine, SmallStep

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    MambaSpec,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
    UniformSpec,
)

Spoil = Callable[[SmallStep, random.Random], None]

HYBRID = serving_limits(70, max_num_reqs=5, max_num_batched_tokens=40)


def hybrid_layouts(limits: ServingLimits = HYBRID) -> list[BlockTableLayout]:
    """One group of each kind, one of them split in four."""
    return [
        BlockTableLayout.plan(AttentionSpec(block_size=8), limits, 2),
        BlockTableLayout.plan(
            SlidingWindowSpec(block_size=4, window=9, extra_retained_tokens=1), limits
        ),
        BlockTableLayout.plan(
            MambaSpec(block_size=8, mode="align", num_speculative_blocks=1), limits
        ),
        BlockTableLayout.plan(MambaSpec(block_size=8, num_speculative_blocks=2), limits),
        BlockTableLayout.plan(RingSpec(block_size=4), limits),
    ]


HYBRID_POOLS = [40, 60, 40, 30, 10]


def sharing_layouts(size: int = 1, rank: int = 0) -> list[BlockTableLayout]:
    """Groups whose blocks requests can share, spread over context-parallel ranks or not."""
    limits = serving_limits(
        70, max_num_reqs=5, max_num_batched_tokens=40, size=size, rank=rank, interleave=2
    )
    members = {"mla": AttentionSpec(block_size=4), "indexer": AttentionSpec(block_size=4)}
    return [
        BlockTableLayout.plan(UniformSpec(members=members), limits, 2),
        BlockTableLayout.plan(AttentionSpec(block_size=8, sharded=False), limits),
        BlockTableLayout.plan(SlidingWindowSpec(block_size=4, window=6), limits, 1),
    ]


SHARING_POOLS = [60, 40, 60]


def plain_engine(layouts: list[BlockTableLayout], pools: list[int], seed: int) -> SmallEngine:
    """An engine whose tables are bt-width's own functions."""
    return SmallEngine(layouts, pools, PlainTables(layouts), seed)


def copy_of(step: SmallStep) -> SmallStep:
    """Return a step whose tensors may be damaged."""
    return replace(
        step,
        block_tables=tuple(table.clone() for table in step.block_tables),
        slot_mappings=step.slot_mappings.clone(),
        seq_lens=step.seq_lens.clone(),
        query_start_loc=step.query_start_loc.clone(),
        num_blocks_of_row=step.num_blocks_of_row.clone(),
        ref_counts=tuple(counts.clone() for counts in step.ref_counts),
        ref_blocks=tuple(blocks.clone() for blocks in step.ref_blocks),
    )


def spoil(step: SmallStep, draw: random.Random) -> SmallStep:
    """Return the step with one to three random numbers changed."""
    spoilt = copy_of(step)
    for _ in range(draw.randint(1, 3)):
        group = draw.randrange(len(step.block_tables))
        tensor, values = draw.choice(
            [
                (spoilt.block_tables[group], [0, 1, 5, 7, 9, 12, -1, 10_000, POISON]),
                (spoilt.slot_mappings[group], [-1, 0, 17, 30, 41, -2, 10_000, 2**40]),
                (spoilt.seq_lens, [-1, 0, 1, 9, 40, 70, 71, POISON]),
                (spoilt.query_start_loc, [-1, 0, 1, 7, 40, 41, POISON]),
                (spoilt.num_blocks_of_row, [-1, 0, 1, 2, 5, 100, POISON]),
                (spoilt.ref_counts[group], [-1, 0, 1, 2]),
                (spoilt.ref_blocks[group], [-1, 0, 1, 5, 9, 10_000]),
            ]
        )
        if tensor.numel():
            flat = draw.randrange(tensor.numel())
            place = torch.unravel_index(torch.tensor(flat), tensor.shape)
            tensor[place] = draw.choice(values)
    return spoilt
