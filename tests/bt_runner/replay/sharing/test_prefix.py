"""Equal beginnings share whole blocks of every group; nothing in use is dropped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bt_runner.replay.sharing.granules import PrefixUse
from bt_runner.replay.sharing.prefix import PrefixCache
from bt_runner.scheduling.block_pool import BlockPool
from bt_width import AttentionSpec, BlockTableLayout, CacheSpec, MambaSpec, ServingLimits

LIMITS = ServingLimits(max_model_len=8192, max_num_reqs=4, max_num_batched_tokens=8192)


class _Cache:
    """A prefix cache with its pools, and requests as lists of blocks."""

    def __init__(self, *specs: CacheSpec, num_blocks: int = 64) -> None:
        self.layouts = [BlockTableLayout.plan(spec, LIMITS) for spec in specs]
        self.pools = [BlockPool(num_blocks) for _ in specs]
        self.cache = PrefixCache(self.layouts, self.pools)

    def compute(
        self, hash_ids: Sequence[int], prompt_len: int
    ) -> tuple[PrefixUse, list[list[int]]]:
        """Let a request take what is shared, compute the rest of its prompt and offer it."""
        use = self.cache.use_of(hash_ids, prompt_len)
        block_ids = self.cache.share(use, prompt_len - 1)
        for layout, pool, ids in zip(self.layouts, self.pools, block_ids, strict=True):
            ids += pool.allocate(layout.num_blocks(prompt_len) - len(ids))
        self.cache.offer(use, prompt_len, block_ids)
        return use, block_ids

    def end(self, use: PrefixUse, block_ids: list[list[int]]) -> None:
        """Let a request give back what it holds."""
        self.cache.leave(use)
        for pool, ids in zip(self.pools, block_ids, strict=True):
            pool.release(ids, last_step=0)
            pool.complete(0)


def test_equal_leading_ids_share_blocks() -> None:
    cache = _Cache(AttentionSpec(block_size=256))
    _, first = cache.compute([1, 2, 3], 1536)

    _, second = cache.compute([1, 2, 7], 1536)

    assert second[0][:4] == first[0][:4]
    assert not set(second[0][4:]) & set(first[0])
    assert cache.cache.hit_tokens == 1024


def test_ids_equal_after_a_difference_share_nothing() -> None:
    cache = _Cache(AttentionSpec(block_size=512))
    _, first = cache.compute([1, 2, 3], 1536)

    _, second = cache.compute([9, 2, 3], 1536)

    assert not set(second[0]) & set(first[0])


def test_ids_equal_after_a_difference_are_never_taken_for_what_follows_it() -> None:
    cache = _Cache(AttentionSpec(block_size=512))
    ended = cache.compute([1, 2, 3], 1536)
    cache.compute([9, 2, 3], 1536)
    cache.end(*ended)
    cache.cache.evict([2], last_step=0)

    _, third = cache.compute([9, 2, 3], 1536)

    assert not set(third[0][1:]) & set(ended[1][0][1:])


@pytest.mark.parametrize(
    ("prompt_len", "hit"),
    [
        pytest.param(1536, 1024, id="the-last-token-is-its-own"),
        pytest.param(1537, 1536, id="one-more-token"),
        pytest.param(600, 512, id="a-block-in-part"),
        pytest.param(512, 0, id="one-block-only"),
    ],
)
def test_a_hit_leaves_the_last_token_to_compute(prompt_len: int, hit: int) -> None:
    cache = _Cache(AttentionSpec(block_size=512))
    cache.compute([1, 2, 3], 1536)

    cache.compute([1, 2, 3, 4], prompt_len)

    assert cache.cache.hit_tokens == hit


def test_b10_a_hit_is_cut_to_whole_blocks_of_every_group() -> None:
    """Blocks of 16 and 24 tokens: 47 tokens may be spared, and 48 would be the common multiple."""
    cache = _Cache(AttentionSpec(block_size=16), AttentionSpec(block_size=24))
    cache.compute([5], 120)

    _, at_47 = cache.compute([5], 48)
    _, at_48 = cache.compute([5], 49)

    assert cache.cache.granule_tokens == 48
    assert cache.cache.hit_tokens == 48
    assert [len(ids) for ids in at_47] == [3, 2]
    assert [len(ids) for ids in at_48] == [4, 3]


def test_a_group_of_states_shares_nothing() -> None:
    cache = _Cache(AttentionSpec(block_size=64), MambaSpec(block_size=64, mode="align"))
    cache.compute([1, 2], 1024)

    cache.compute([1, 2], 1024)

    assert cache.cache.hit_tokens == 0


def test_a_block_in_use_survives_eviction() -> None:
    cache = _Cache(AttentionSpec(block_size=512))
    ended = cache.compute([1, 2], 1024)
    cache.compute([1, 7], 1024)
    cache.end(*ended)

    evicted = [cache.cache.evict([count], last_step=0) for count in (2, 1)]
    cache.pools[0].complete(0)

    assert evicted == [False, True]
    shared, private = ended[1][0]
    assert cache.pools[0].references(shared) == 2
    assert cache.pools[0].references(private) == 0


def test_ends_go_before_beginnings_and_the_oldest_use_first() -> None:
    cache = _Cache(AttentionSpec(block_size=512))
    old = cache.compute([1, 2], 1024)
    new = cache.compute([8, 9], 1024)
    cache.end(*old)
    cache.end(*new)

    cache.cache.evict([3], last_step=0)

    cache.compute([1, 2, 3], 1025)
    assert cache.cache.hit_tokens == 0
    cache.compute([8, 9, 3], 1025)
    assert cache.cache.hit_tokens == 512


def test_what_a_request_computed_again_stays_its_own() -> None:
    cache = _Cache(AttentionSpec(block_size=512))
    first, second = (cache.cache.use_of([1], 512) for _ in range(2))
    blocks = [[cache.pools[0].allocate(1)] for _ in range(2)]
    for use, ids in zip((first, second), blocks, strict=True):
        cache.cache.offer(use, 512, ids)

    assert cache.cache.held_blocks(0) == blocks[0][0]
    assert cache.pools[0].references(blocks[1][0][0]) == 1


def test_all_blocks_come_back() -> None:
    cache = _Cache(AttentionSpec(block_size=256))
    for ids in ([1, 2], [1, 3], [4], [1, 2]):
        cache.end(*cache.compute(ids, 512 * len(ids)))

    cache.cache.evict([cache.cache.num_idle], last_step=0)
    cache.pools[0].complete(0)

    assert cache.pools[0].num_free == cache.pools[0].capacity


def test_what_a_preempted_request_finds_again_is_counted_apart() -> None:
    """Between requests 512 tokens were shared, however often they are found again."""
    cache = _Cache(AttentionSpec(block_size=256))
    cache.compute([1], 512)
    use = cache.cache.use_of([1], 600)

    for _ in range(3):
        ids = cache.cache.share(use, 599)
        cache.cache.offer(use, 512, ids)
        cache.cache.leave(use)
        cache.pools[0].release(ids[0], last_step=0)

    assert (cache.cache.hit_tokens, cache.cache.rehit_tokens) == (512, 1024)


def test_ids_of_smaller_blocks_share_no_more_than_they_name() -> None:
    """Four equal ids of 16 tokens are 64 tokens."""
    cache = _Cache(AttentionSpec(block_size=16))
    for own in (100, 200):
        use = cache.cache.use_of([1, 2, 3, 4, own, own + 1], 96, hash_tokens=16)
        ids = cache.cache.share(use, 95)
        ids[0] += cache.pools[0].allocate(6 - len(ids[0]))
        cache.cache.offer(use, 96, ids)

    assert cache.cache.hit_tokens == 64
