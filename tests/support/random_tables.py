"""Random plans, ids and batches for tables: odd sizes, null ids, ids near the int32 limit."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from tests.support.table_model import TableModel

from bt_tables import StepBatch
from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    ContextParallel,
    MambaSpec,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
)


def random_layouts(draw: random.Random, *, max_num_reqs: int = 5) -> list[BlockTableLayout]:
    """One to four groups of different kinds, block sizes, splits and shards."""
    size = draw.choice([1, 1, 2, 3])
    context = ContextParallel(
        size=size, rank=draw.randrange(size), interleave=draw.choice([1, 1, 2, 4])
    )
    limits = ServingLimits(
        max_model_len=draw.randint(20, 70),
        max_num_reqs=max_num_reqs,
        max_num_batched_tokens=draw.choice([7, 24, 150]),
        context_parallel=context,
    )
    plans = []
    for _ in range(draw.randint(1, 4)):
        spec, kernel_block_size = _random_group(draw)
        plans.append(BlockTableLayout.plan(spec, limits, kernel_block_size))
    return plans


def _random_group(draw: random.Random) -> tuple[CacheSpec, int | None]:
    block_size = draw.choice([4, 12, 20])
    alignment = draw.choice([None, 16])
    match draw.randrange(6):
        case 0:
            return SlidingWindowSpec(block_size=block_size, window=9, token_alignment=alignment), 4
        case 1:
            return MambaSpec(block_size=8, mode=draw.choice(["none", "align"])), None
        case 2:
            return RingSpec(block_size=draw.choice([3, 8])), None
        case _:
            spec = AttentionSpec(
                block_size=block_size, sharded=draw.random() < 0.7, token_alignment=alignment
            )
            return spec, draw.choice([None, 4, 2 if block_size > 4 else 4])


def random_ids(
    draw: random.Random, model: TableModel, row: int, *, replace: bool, most: int = 9
) -> list[list[int]]:
    """Ids for a row of every group that still fit it, of which some are null or huge."""
    found = []
    for group, layout in enumerate(model.layouts):
        room = layout.blocks_per_row if replace else model.room(row, group)
        count = draw.choice([0, 1, min(most, room), room]) if room else 0
        ids = [draw.randint(1, 1000) for _ in range(min(count, room))]
        for place in range(len(ids)):
            if draw.random() < 0.1:
                ids[place] = draw.choice([0, layout.max_block_id])
        found.append(ids)
    return found


@dataclass(frozen=True)
class RandomBatch:
    """A batch as plain lists.

    Attributes:
        rows: The row of each request; -1 is padding, a row may come twice.
        starts: First token of each request, and the end of the last.
        positions: Place of each token, some of them nowhere.
        num_reqs_padded: Rows of the returned tables.
        num_tokens_padded: Slots of the returned mappings.
    """

    rows: list[int]
    starts: list[int]
    positions: list[int]
    num_reqs_padded: int
    num_tokens_padded: int

    def as_step(self) -> StepBatch:
        """The batch as a step takes it."""
        return StepBatch(
            idx_mapping=np.array(self.rows, np.int32),
            query_start_loc=np.array(self.starts, np.int32),
            positions=np.array(self.positions, np.int64),
            num_reqs_padded=self.num_reqs_padded,
            num_tokens_padded=self.num_tokens_padded,
        )


def random_batch(draw: random.Random, model: TableModel, rows: list[int]) -> RandomBatch:
    """Tokens for these rows, requests without any among them."""
    limits = model.limits
    left = limits.max_num_batched_tokens
    starts = [0]
    for _ in rows:
        count = min(draw.choice([0, 1, 1, 2, 40]), left)
        left -= count
        starts.append(starts[-1] + count)
    longest = 2 * limits.max_model_len
    odd = [-1, -(2**40), 2**31 - 1, 2**31, 2**40]
    positions = [
        draw.choice(odd) if draw.random() < 0.1 else draw.randrange(longest)
        for _ in range(starts[-1])
    ]
    return RandomBatch(
        rows,
        starts,
        positions,
        draw.randint(len(rows), limits.max_num_reqs),
        draw.randint(starts[-1], limits.max_num_batched_tokens),
    )


def random_rows(draw: random.Random, model: TableModel, current: list[int]) -> list[int]:
    """The rows of the next batch: often the current ones, extended or cut or in another order."""
    num_rows = model.limits.max_num_reqs
    match draw.randrange(6):
        case 0 | 1:
            return list(current)
        case 2:
            return current[: draw.randint(0, len(current))]
        case 3:
            return draw.sample(current, len(current))
        case 4:
            return [draw.randrange(-1, num_rows) for _ in range(draw.randint(0, num_rows))]
        case _:
            return draw.sample(range(num_rows), draw.randint(0, num_rows))
