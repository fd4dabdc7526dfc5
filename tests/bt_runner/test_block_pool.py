"""References, cooling, eviction and recovery of one group's blocks."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from bt_runner.block_pool import BlockPool
from bt_runner.errors import BadInputError, PoolExhaustedError
from bt_width import NULL_BLOCK


def _hash(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _register(pool: BlockPool, ids: list[int], hashes: list[bytes]) -> None:
    for block_id, block_hash in zip(ids, hashes, strict=True):
        pool.register(block_id, block_hash)


def _registered(pool: BlockPool, *numbers: int) -> list[int]:
    """Allocate a block for each number and make it findable by that."""
    ids: list[int] = pool.allocate(len(numbers)).tolist()
    _register(pool, ids, [_hash(number) for number in numbers])
    return ids


class TestAllocation:
    def test_block_0_is_never_given(self) -> None:
        """The null block pads tables: given away, it would be written by its owner."""
        pool = BlockPool(5)
        ids = pool.allocate(pool.capacity)
        assert sorted(ids.tolist()) == [1, 2, 3, 4]
        assert NULL_BLOCK not in ids
        assert ids.dtype == np.int32

    @pytest.mark.parametrize("num_blocks", [0, 1], ids=["none", "only-null"])
    def test_a_pool_without_a_block_is_refused(self, num_blocks: int) -> None:
        with pytest.raises(BadInputError, match="block 0 is reserved"):
            BlockPool(num_blocks)

    def test_too_few_blocks_are_not_taken_in_part(self) -> None:
        pool = BlockPool(4)
        with pytest.raises(PoolExhaustedError, match="4 blocks were asked, 3 of 3 are free"):
            pool.allocate(4)
        assert (pool.num_free, pool.num_used) == (3, 0)

    def test_no_block_can_be_asked_for(self) -> None:
        pool = BlockPool(2)
        assert pool.allocate(0).tolist() == []

    def test_the_peak_counts_blocks_that_cool(self) -> None:
        """They are as little to be had as those in use."""
        pool = BlockPool(5)
        ids = pool.allocate(2)
        pool.release(ids, last_step=9)
        pool.allocate(1)
        assert pool.peak_used == 3

    def test_the_peak_counts_blocks_that_come_back(self) -> None:
        pool = BlockPool(5)
        ids = _registered(pool, 1, 2)
        pool.release(ids, last_step=0)
        pool.allocate(1)
        pool.acquire(ids)
        assert pool.peak_used == 3


class TestReferences:
    def test_a_shared_block_is_free_only_after_its_last_reference(self) -> None:
        """Two requests may hold a block; the first to end does not take it away."""
        pool = BlockPool(3)
        (block,) = pool.allocate(1)
        pool.acquire([block])
        pool.release([block], last_step=0)
        assert pool.references[block] == 1
        assert pool.num_free == 1
        pool.release([block], last_step=0)
        assert pool.references[block] == 0
        assert pool.num_free == 2

    def test_one_call_may_drop_several_references_to_a_block(self) -> None:
        """Two requests that share it end in one step."""
        pool = BlockPool(3)
        (block,) = pool.allocate(1)
        pool.acquire([block])
        pool.release([block, block], last_step=3)
        assert (pool.num_free, pool.num_cooling, pool.num_used) == (1, 1, 0)
        pool.complete(3)
        assert sorted(pool.allocate(2).tolist()) == [1, 2]

    @pytest.mark.parametrize("ids", [[1, 1], [2]], ids=["twice", "never-taken"])
    def test_a_block_that_is_not_held_is_not_released(self, ids: list[int]) -> None:
        """A double free would give one block to two requests."""
        pool = BlockPool(4)
        pool.allocate(1)
        with pytest.raises(BadInputError, match="is held"):
            pool.release(ids, last_step=0)
        assert pool.references[1] == 1
        assert pool.references[2] == 0

    def test_a_block_that_is_neither_held_nor_findable_is_not_acquired(self) -> None:
        """What is in it is unknown."""
        pool = BlockPool(3)
        ids = pool.allocate(1)
        pool.release(ids, last_step=0)
        with pytest.raises(BadInputError, match="neither held nor findable"):
            pool.acquire(ids)
        assert (pool.num_free, pool.num_used) == (2, 0)

    def test_null_blocks_of_a_row_are_skipped(self) -> None:
        """A window's row begins with them, and so does one of recurrent states."""
        pool = BlockPool(4)
        (block,) = pool.allocate(1).tolist()
        pool.acquire([NULL_BLOCK, block])
        pool.release([NULL_BLOCK, block], last_step=0)
        assert pool.references.tolist() == [0, 1, 0, 0]

    def test_reference_counts_cannot_be_written_by_readers(self) -> None:
        with pytest.raises(ValueError, match="read-only"):
            BlockPool(3).references[1] = 5


class TestCooling:
    def test_a_freed_block_waits_for_the_steps_that_may_touch_it(self) -> None:
        """Freed in step 3, it comes back when step 3 has ended, not when step 2 has."""
        pool = BlockPool(2)
        ids = pool.allocate(1)
        pool.complete(1)
        pool.release(ids, last_step=3)
        pool.complete(2)
        assert (pool.num_free, pool.num_cooling) == (0, 1)
        with pytest.raises(PoolExhaustedError):
            pool.allocate(1)
        pool.complete(3)
        assert pool.allocate(1).tolist() == ids.tolist()

    def test_a_block_freed_after_its_steps_have_ended_is_free_at_once(self) -> None:
        pool = BlockPool(2)
        ids = pool.allocate(1)
        pool.complete(5)
        pool.release(ids, last_step=5)
        assert pool.num_free == 1

    def test_a_findable_block_comes_back_from_cooling_and_stays(self) -> None:
        """The step that it was cooling for ends while somebody holds it again."""
        pool = BlockPool(2)
        ids = _registered(pool, 7)
        pool.release(ids, last_step=3)
        pool.acquire(ids)
        pool.complete(3)
        assert (pool.num_free, pool.num_cooling, pool.num_used) == (0, 0, 1)

    def test_a_block_released_twice_cools_for_its_last_release(self) -> None:
        pool = BlockPool(2)
        ids = _registered(pool, 7)
        pool.release(ids, last_step=3)
        pool.acquire(ids)
        pool.release(ids, last_step=5)
        pool.complete(3)
        assert (pool.num_free, pool.num_cooling) == (0, 1)
        pool.complete(5)
        assert (pool.num_free, pool.num_cooling) == (1, 0)


class TestFindableBlocks:
    def test_a_released_block_stays_findable_until_its_room_is_needed(self) -> None:
        pool = BlockPool(4)
        ids = _registered(pool, 7)
        pool.release(ids, last_step=0)
        pool.allocate(2)
        assert pool.lookup(_hash(7)) == ids[0]
        pool.allocate(1)
        assert pool.lookup(_hash(7)) is None

    def test_the_least_recently_used_goes_first(self) -> None:
        pool = BlockPool(4)
        ids = _registered(pool, 1, 2, 3)
        for block in ids:
            pool.release([block], last_step=0)
        pool.acquire(ids[:1])
        pool.release(ids[:1], last_step=0)
        assert pool.allocate(2).tolist() == ids[1:]
        assert pool.lookup(_hash(1)) == ids[0]

    def test_the_end_of_a_row_goes_before_its_beginning(self) -> None:
        """A beginning is of use without its end, and an end is of none without its beginning."""
        pool = BlockPool(4)
        ids = _registered(pool, 1, 2, 3)
        pool.release(ids, last_step=0)
        assert pool.allocate(2).tolist() == [ids[2], ids[1]]
        assert pool.lookup(_hash(1)) == ids[0]

    def test_the_first_block_with_a_hash_keeps_it(self) -> None:
        """Two requests computed the same; the later copy stays private."""
        pool = BlockPool(3)
        first = _registered(pool, 1)
        second = _registered(pool, 1)
        assert pool.lookup(_hash(1)) == first[0]
        pool.release(second, last_step=0)
        assert pool.allocate(1).tolist() == second
        assert pool.lookup(_hash(1)) == first[0]

    def test_a_block_keeps_its_first_hash(self) -> None:
        pool = BlockPool(3)
        ids = _registered(pool, 1)
        pool.register(ids[0], _hash(2))
        assert pool.lookup(_hash(2)) is None
        assert pool.num_findable == 1

    def test_a_block_without_references_gets_no_hash(self) -> None:
        """It may be given away before anybody computes into it."""
        pool = BlockPool(3)
        with pytest.raises(BadInputError, match="block 2 is not held"):
            pool.register(2, _hash(1))
        assert pool.lookup(_hash(1)) is None

    def test_a_block_that_was_given_anew_is_not_found_by_what_was_in_it(self) -> None:
        pool = BlockPool(2)
        pool.release(_registered(pool, 1), last_step=0)
        _registered(pool, 2)
        assert pool.lookup(_hash(1)) is None
        assert pool.lookup(_hash(2)) == 1


class TestRecount:
    def test_counts_are_what_is_held_whatever_they_were(self) -> None:
        """A block without references comes back when the last step that may touch it has ended."""
        pool = BlockPool(6)
        first, second, _ = pool.allocate(3).tolist()
        pool.release([second], last_step=2)
        pool.recount([first, first], last_step=4)
        assert pool.references.tolist() == [0, 2, 0, 0, 0, 0]
        assert (pool.num_free, pool.num_cooling, pool.num_used) == (0, 4, 1)
        pool.complete(4)
        assert sorted(pool.allocate(4).tolist()) == [2, 3, 4, 5]

    def test_nothing_is_findable_afterwards(self) -> None:
        """The failed step may not have computed what the hash says."""
        pool = BlockPool(3)
        ids = _registered(pool, 1, 2)
        pool.recount(ids, last_step=0)
        assert pool.lookup(_hash(1)) is None
        pool.release(ids, last_step=0)
        with pytest.raises(BadInputError, match="neither held nor findable"):
            pool.acquire(ids)


class _Oracle:
    """The same pool with a dictionary per question and a list per order."""

    def __init__(self, num_blocks: int) -> None:
        self.references = dict.fromkeys(range(1, num_blocks), 0)
        self.free_plain = list(range(1, num_blocks))
        self.free_findable: list[int] = []
        self.cooling: list[tuple[int, int]] = []
        self.hashes: dict[int, bytes] = {}
        self.completed = 0

    def allocate(self, count: int) -> list[int]:
        taken = (self.free_plain + self.free_findable)[:count]
        for block in taken:
            self._leave_queues(block)
            self.hashes.pop(block, None)
            self.references[block] = 1
        return taken

    def acquire(self, ids: list[int]) -> None:
        for block in ids:
            self._leave_queues(block)
            self.references[block] += 1

    def release(self, ids: list[int], last_step: int) -> None:
        for block in ids:
            self.references[block] -= 1
        dead = [block for block in dict.fromkeys(ids) if self.references[block] == 0]
        self.cooling += [(last_step, block) for block in reversed(dead)]
        self.complete(self.completed)

    def complete(self, step: int) -> None:
        self.completed = max(self.completed, step)
        for last_step, block in list(self.cooling):
            if last_step <= self.completed:
                self.cooling.remove((last_step, block))
                (self.free_findable if block in self.hashes else self.free_plain).append(block)

    def register(self, ids: list[int], hashes: list[bytes]) -> None:
        for block, name in zip(ids, hashes, strict=True):
            if block not in self.hashes and name not in self.hashes.values():
                self.hashes[block] = name

    def recount(self, held: list[int], last_step: int) -> None:
        self.references = {block: held.count(block) for block in self.references}
        self.hashes, self.free_plain, self.free_findable = {}, [], []
        self.cooling = [(last_step, b) for b, count in self.references.items() if not count]
        self.complete(self.completed)

    def _leave_queues(self, block: int) -> None:
        self.free_plain = [other for other in self.free_plain if other != block]
        self.free_findable = [other for other in self.free_findable if other != block]
        self.cooling = [entry for entry in self.cooling if entry[1] != block]


def _assert_equal(pool: BlockPool, oracle: _Oracle) -> None:
    counts = [0] + [oracle.references[block] for block in range(1, pool.num_blocks)]
    assert pool.references.tolist() == counts
    assert pool.num_used == sum(count > 0 for count in counts)
    assert pool.num_free == len(oracle.free_plain) + len(oracle.free_findable)
    assert pool.num_cooling == len(oracle.cooling)
    assert pool.num_findable == len(oracle.hashes)
    for block, name in oracle.hashes.items():
        assert pool.lookup(name) == block


@pytest.mark.parametrize("seed", range(60))
def test_a_random_history_is_that_of_a_plain_pool(seed: int) -> None:
    """Counts, hashes, and which block is given, after every call of 400."""
    draw = random.Random(seed)
    num_blocks = draw.choice([2, 3, 9, 40])
    pool, oracle = BlockPool(num_blocks), _Oracle(num_blocks)
    holders: list[list[int]] = []
    step = 0

    def allocate() -> None:
        ids = pool.allocate(draw.randint(0, pool.num_free)).tolist()
        assert ids == oracle.allocate(len(ids))
        holders.append(ids)

    def acquire() -> None:
        known = sorted(set(oracle.hashes) | {b for b, n in oracle.references.items() if n})
        ids = draw.choices(known, k=draw.randint(0, 5)) if known else []
        pool.acquire(ids)
        oracle.acquire(ids)
        holders.append(ids)

    def release() -> None:
        ids = [b for _ in range(2) if holders for b in holders.pop(draw.randrange(len(holders)))]
        last_step = step + draw.randint(-1, 1)
        pool.release(ids, last_step=last_step)
        oracle.release(ids, last_step)

    def register() -> None:
        ids = draw.choice(holders) if holders else []
        hashes = [_hash(draw.randrange(3 * num_blocks)) for _ in ids]
        _register(pool, ids, hashes)
        oracle.register(ids, hashes)

    def complete() -> None:
        nonlocal step
        step += draw.randint(0, 2)
        pool.complete(step - 1)
        oracle.complete(step - 1)

    def recount() -> None:
        if draw.random() < 0.1:
            held = [block for ids in holders for block in ids]
            pool.recount(held, last_step=step)
            oracle.recount(held, step)

    calls: list[Callable[[], None]] = [allocate, acquire, release, register, complete, recount]
    for _ in range(400):
        draw.choice(calls)()
        _assert_equal(pool, oracle)


def test_a_queue_does_not_grow_with_its_history() -> None:
    """Blocks that come back leave stale entries behind; they are cleared, not kept."""
    pool = BlockPool(9)
    ids = _registered(pool, *range(8))
    for step in range(1000):
        pool.release(ids, last_step=step)
        pool.complete(step)
        pool.acquire(ids)
    pool.release(ids, last_step=0)
    assert len(pool._findable._ids) == 18
    assert sorted(pool.allocate(8).tolist()) == sorted(ids)


def _lines_of(call: Callable[[], object]) -> int:
    """Count the lines of Python that a call carries out."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


def test_a_bulk_call_costs_the_same_lines_for_any_number_of_blocks() -> None:
    """A step of many requests calls once; blocks without a hash cost no Python each."""

    def costs(num_blocks: int) -> list[int]:
        pool = BlockPool(4 * num_blocks)
        ids = pool.allocate(num_blocks)
        return [
            _lines_of(lambda: pool.allocate(num_blocks)),
            _lines_of(lambda: pool.acquire(ids)),
            _lines_of(lambda: pool.release(np.concatenate((ids, ids)), last_step=9)),
            _lines_of(lambda: pool.complete(9)),
            _lines_of(lambda: pool.recount(ids, last_step=9)),
        ]

    assert costs(4096) == costs(64)
