"""A token is read where it was written: any other place, or a rank too many, is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.soak.token_store import TokenStore

from bt_runner.errors import VerificationError
from bt_runner.input_batch import dummy_batch
from bt_runner.requests import Request, SamplingParams
from bt_runner.scheduler import SchedulerOutput
from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    ContextParallel,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
)

NUM_BLOCKS = 12


def _layouts(spec: CacheSpec, num_ranks: int = 1) -> list[BlockTableLayout]:
    limits = ServingLimits(max_model_len=32, max_num_reqs=2, max_num_batched_tokens=32)
    return [
        BlockTableLayout.plan(
            spec, replace(limits, context_parallel=ContextParallel(size=num_ranks, rank=rank))
        )
        for rank in range(num_ranks)
    ]


def _part(start: int, num_tokens: int, num_preemptions: int = 0) -> SchedulerOutput:
    request = Request("a", np.zeros(1, np.int32), SamplingParams())
    request.num_preemptions = num_preemptions
    requests = np.full(1, None, dtype=object)
    requests[0] = request
    return replace(
        dummy_batch(1, 1),
        requests=requests,
        starts=np.array([start]),
        num_known=np.array([num_tokens]),
    )


def _step(
    layouts: list[BlockTableLayout], ids: list[int], part: SchedulerOutput
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int32]]]:
    positions = range(int(part.starts[0]), int(part.seq_lens[0]))
    slots = [
        np.array([layout.slot(position, layout.expand(ids)) for position in positions])
        for layout in layouts
    ]
    row = layouts[0].expand(ids)
    table = np.array([row + [0] * (layouts[0].width - len(row))], dtype=np.int32)
    return slots, [table] * len(layouts)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_was_written_is_read_in_a_later_step(num_ranks: int) -> None:
    layouts = _layouts(AttentionSpec(block_size=4), num_ranks)
    store = TokenStore(layouts, NUM_BLOCKS)
    for part in (_part(0, 9), _part(9, 1), _part(10, 3)):
        slots, tables = _step(layouts, [7, 3, 5, 2], part)
        store.write(part, slots, 0)
        store.read(part, tables, 0)


def test_a_token_on_two_ranks_is_named() -> None:
    layouts = _layouts(AttentionSpec(block_size=4), 2)
    store = TokenStore(layouts, NUM_BLOCKS)
    slots, _ = _step(layouts, [7, 3], _part(0, 9))

    with pytest.raises(VerificationError, match="token 0 of the batch lies on 2 ranks, not on 1"):
        store.write(_part(0, 9), [slots[0], slots[0]], 0)


def test_a_replicated_token_that_one_rank_lacks_is_named() -> None:
    layouts = _layouts(AttentionSpec(block_size=4, sharded=False), 2)
    store = TokenStore(layouts, NUM_BLOCKS)
    slots, _ = _step(layouts, [7, 3], _part(0, 5))
    slots[1][2] = -1

    with pytest.raises(VerificationError, match="token 2 of the batch lies on 1 ranks, not on 2"):
        store.write(_part(0, 5), slots, 0)


def test_a_row_that_changed_its_blocks_is_found_when_it_is_read() -> None:
    layouts = _layouts(AttentionSpec(block_size=4))
    store = TokenStore(layouts, NUM_BLOCKS)
    slots, _ = _step(layouts, [7, 3], _part(0, 8))
    store.write(_part(0, 8), slots, 0)
    _, swapped = _step(layouts, [3, 7], _part(0, 8))

    with pytest.raises(VerificationError) as caught:
        store.read(_part(8, 0), swapped, 0)

    assert (caught.value.details["request"], caught.value.details["position"]) == ("a", 0)


def test_what_a_life_before_the_preemption_wrote_does_not_count() -> None:
    layouts = _layouts(AttentionSpec(block_size=4))
    store = TokenStore(layouts, NUM_BLOCKS)
    slots, tables = _step(layouts, [7], _part(0, 4))
    store.write(_part(0, 4), slots, 0)

    with pytest.raises(VerificationError):
        store.read(_part(0, 4, num_preemptions=1), tables, 0)


def test_a_block_behind_the_window_is_not_read() -> None:
    layouts = _layouts(SlidingWindowSpec(block_size=4, window=4))
    store = TokenStore(layouts, NUM_BLOCKS)
    slots, _ = _step(layouts, [7, 3], _part(0, 8))
    store.write(_part(0, 8), slots, 0)
    part = _part(8, 1)
    slots, tables = _step(layouts, [0, 3, 5], part)

    store.write(part, slots, 0)
    store.read(part, tables, 0)


def test_a_ring_holds_its_last_tokens() -> None:
    layouts = _layouts(RingSpec(block_size=4))
    store = TokenStore(layouts, NUM_BLOCKS)
    part = _part(0, 11)
    slots, tables = _step(layouts, [7], part)

    store.write(part, slots, 0)
    store.read(part, tables, 0)
