"""What is read must be what was computed: another place, another's block or state is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.simulator.memory import StateMemory, TokenMemory
from tests.simulator.names import Text

from bt_runner.arrays import Ints
from bt_runner.block_pool import BlockPool
from bt_runner.errors import VerificationError
from bt_runner.input_batch import dummy_batch
from bt_runner.requests import Request, SamplingParams
from bt_runner.scheduler import SchedulerOutput
from bt_width import (
    PAD_SLOT,
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    ContextParallel,
    MambaSpec,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
)

NUM_BLOCKS = 12
TEXT = Text(Request("a", np.zeros(1, np.int32), SamplingParams(max_new_tokens=31)))
OTHER = Text(Request("b", np.ones(1, np.int32), SamplingParams(max_new_tokens=31)))


class _Cache:
    """One group on some ranks, all of whose blocks are held once."""

    def __init__(self, spec: CacheSpec, num_ranks: int = 1) -> None:
        limits = ServingLimits(max_model_len=32, max_num_reqs=2, max_num_batched_tokens=32)
        self.pool = BlockPool(NUM_BLOCKS)
        self.pool.allocate(NUM_BLOCKS - 1)
        self.layouts = [
            BlockTableLayout.plan(
                spec, replace(limits, context_parallel=ContextParallel(size=num_ranks, rank=rank))
            )
            for rank in range(num_ranks)
        ]
        self.memories = [
            TokenMemory("tokens", layout, self.pool)
            for layout in self.layouts
            if layout.slot_mode != "none"
        ]

    def write(self, ids: list[int], start: int, end: int, text: Text = TEXT) -> Ints:
        """Write a span of a text; return how many ranks keep each token."""
        counts: Ints = np.zeros(end - start, np.int64)
        for layout, memory in zip(self.layouts, self.memories, strict=True):
            slots = [layout.slot(position, layout.expand(ids)) for position in range(start, end)]
            counts += memory.write(np.array(slots), text.names[start + 1 : end + 1])
        return counts

    def read(self, ids: list[int], start: int, end: int, text: Text = TEXT) -> None:
        """Read what a step that computes a span of a text sees."""
        row = self.layouts[0].expand(ids)
        table = np.zeros((1, self.layouts[0].width), np.int32)
        table[0, : len(row)] = row
        for memory in self.memories:
            memory.read(_batch(start, end, text), table, [text.names[: end + 1]])


def _batch(start: int, end: int, text: Text = TEXT) -> SchedulerOutput:
    requests = np.full(1, None, dtype=object)
    requests[0] = text.request
    return replace(
        dummy_batch(1, 1),
        requests=requests,
        starts=np.array([start]),
        num_known=np.array([end - start]),
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_was_written_is_read_in_a_later_step(num_ranks: int) -> None:
    cache, ids = _Cache(AttentionSpec(block_size=4), num_ranks), [7, 3, 5, 2]
    for start, end in ((0, 9), (9, 10), (10, 13)):
        assert (cache.write(ids, start, end) == 1).all()
        cache.read(ids, start, end)


def test_a_replicated_token_lies_on_every_rank() -> None:
    cache = _Cache(AttentionSpec(block_size=4, sharded=False), 2)

    assert cache.write([7, 3], 0, 5).tolist() == [2] * 5


def test_padding_is_written_nowhere() -> None:
    (memory,) = _Cache(AttentionSpec(block_size=4)).memories

    assert not memory.write(np.array([PAD_SLOT]), TEXT.names[:1]).any()
    assert not memory.names.any()


def test_a_row_that_changed_its_blocks_is_found_when_it_is_read() -> None:
    cache = _Cache(AttentionSpec(block_size=4))
    cache.write([7, 3], 0, 8)

    with pytest.raises(VerificationError) as caught:
        cache.read([3, 7], 8, 8)

    assert (caught.value.details["request"], caught.value.details["position"]) == ("a", 0)


def test_a_block_with_another_text_is_found_when_it_is_read() -> None:
    cache = _Cache(AttentionSpec(block_size=4))
    cache.write([7], 0, 4, OTHER)

    with pytest.raises(VerificationError, match="position 0 of request a is not where rank 0"):
        cache.read([7], 0, 4)


def test_what_a_step_wrote_that_failed_is_not_trusted() -> None:
    cache = _Cache(AttentionSpec(block_size=4))
    cache.write([7], 0, 4)
    cache.memories[0].forget()

    with pytest.raises(VerificationError):
        cache.read([7], 0, 4)


def test_a_block_that_two_hold_is_not_written() -> None:
    cache = _Cache(AttentionSpec(block_size=4))
    cache.pool.acquire([3])

    with pytest.raises(VerificationError, match="block 3 is written, and 2 hold it"):
        cache.write([7, 3], 0, 5)


def test_a_block_that_can_be_found_keeps_what_it_holds() -> None:
    cache = _Cache(AttentionSpec(block_size=4))
    cache.write([7], 0, 4)
    cache.pool.register(7, b"four tokens")
    cache.write([7], 3, 4)

    with pytest.raises(VerificationError, match="block 7 changes, and can be found"):
        cache.write([7], 3, 4, OTHER)


def test_a_block_behind_the_window_is_not_read() -> None:
    cache = _Cache(SlidingWindowSpec(block_size=4, window=4))
    cache.write([7, 3], 0, 8)

    cache.write([0, 3, 5], 8, 9)
    cache.read([0, 3, 5], 8, 9)


def test_a_ring_holds_its_last_tokens() -> None:
    cache = _Cache(RingSpec(block_size=4))

    cache.write([7], 0, 11)
    cache.read([7], 0, 11)


def test_a_state_is_copied_as_it_was_and_into_a_block_of_its_own() -> None:
    """All sources are read before a target is written; the null block is none."""
    cache = _Cache(MambaSpec(block_size=4, mode="align"))
    memory = StateMemory("states", cache.layouts[0], cache.pool)
    memory.names[[3, 5]] = TEXT.names[[7, 8]]

    memory.copy(np.array([3, 5, 9]), np.array([5, 4, 0]))
    cache.pool.acquire([7])

    assert memory.names[[3, 5, 4]].tolist() == TEXT.names[[7, 7, 8]].tolist()
    with pytest.raises(VerificationError, match="block 7 is written, and 2 hold it"):
        memory.copy(np.array([3]), np.array([7]))
