"""Who may take which block, and when a freed one may be taken again."""

import pytest

from bt_runner.errors import BadInputError, PoolExhaustedError
from bt_runner.scheduling.block_pool import BlockPool
from bt_width import NULL_BLOCK


def test_c1_block_0_is_never_handed_out() -> None:
    """The null block pads tables: handed out, it would be written by its owner."""
    pool = BlockPool(5)
    ids = pool.allocate(pool.capacity)
    assert sorted(ids) == [1, 2, 3, 4]
    assert NULL_BLOCK not in ids


@pytest.mark.parametrize("num_blocks", [0, 1], ids=["none", "only-null"])
def test_a_pool_without_a_block_is_refused(num_blocks: int) -> None:
    """It could never serve anybody."""
    with pytest.raises(BadInputError, match="block 0 is reserved"):
        BlockPool(num_blocks)


def test_too_few_blocks_are_not_taken_in_part() -> None:
    """A request gets all it asks for or nothing."""
    pool = BlockPool(4)
    with pytest.raises(PoolExhaustedError, match="4 blocks were asked, 3 of 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3
    assert pool.num_used == 0


def test_a_shared_block_is_free_only_after_its_last_reference() -> None:
    """Two requests may hold a block; the first to end does not take it away."""
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.retain([block])
    pool.release([block], last_step=0)
    assert pool.references(block) == 1
    assert pool.num_free == 1
    pool.release([block], last_step=0)
    assert pool.references(block) == 0
    assert pool.num_free == 2


def test_a_freed_block_waits_for_the_steps_that_may_touch_it() -> None:
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
    assert pool.allocate(1) == ids


def test_a_block_freed_after_its_steps_have_ended_is_free_at_once() -> None:
    """Nothing under way can touch it."""
    pool = BlockPool(2)
    ids = pool.allocate(1)
    pool.complete(5)
    pool.release(ids, last_step=5)
    assert pool.num_free == 1


@pytest.mark.parametrize("ids", [[1, 1], [2]], ids=["twice", "never-taken"])
def test_a_block_that_is_not_held_is_not_released(ids: list[int]) -> None:
    """A double free would give one block to two requests."""
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(BadInputError, match="is held"):
        pool.release(ids, last_step=0)
    assert pool.references(1) == 1


def test_recounted_books_say_what_is_held_whatever_they_said() -> None:
    """What nobody holds comes back, when the last step that may touch it has ended."""
    pool = BlockPool(6)
    first, second, _ = pool.allocate(3)
    pool.release([second], last_step=2)
    pool.recount([first, first], last_step=4)
    assert pool.reference_counts() == [0, 2, 0, 0, 0, 0]
    assert (pool.num_free, pool.num_cooling) == (0, 4)
    pool.complete(4)
    assert sorted(pool.allocate(4)) == [2, 3, 4, 5]


def test_the_peak_counts_blocks_that_cool() -> None:
    """They are as little to be had as those in use."""
    pool = BlockPool(5)
    ids = pool.allocate(2)
    pool.release(ids, last_step=9)
    pool.allocate(1)
    assert pool.peak_used == 3
