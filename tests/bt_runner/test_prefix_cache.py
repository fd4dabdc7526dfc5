"""The longest prefix that all groups can continue from, and what may be found again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from bt_runner.block_pool import BlockPool
from bt_runner.prefix_cache import (
    PrefixCache,
    PrefixHashes,
    TokenHashes,
    TraceHashes,
)
from bt_width import (
    NULL_BLOCK,
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    ContextParallel,
    MambaSpec,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
)

LIMITS = ServingLimits(max_model_len=4096, max_num_reqs=4, max_num_batched_tokens=4096)
FULL = AttentionSpec(block_size=16)
WINDOW = SlidingWindowSpec(block_size=16, window=33)
STATES = MambaSpec(block_size=32, mode="align")


def _hash(hashes: TokenHashes, tokens: Sequence[int]) -> TokenHashes:
    hashes.extend(np.array(tokens, np.int32))
    return hashes


@dataclass
class _Row:
    """A request's tokens, and its blocks in each group."""

    tokens: list[int]
    hashes: TokenHashes
    num_computed: int = 0
    block_ids: list[list[int]] = field(default_factory=list)


class _Cache:
    """A prefix cache over pools, with requests computed chunk by chunk."""

    def __init__(
        self, *specs: CacheSpec, num_blocks: int = 200, limits: ServingLimits = LIMITS
    ) -> None:
        self.layouts = [BlockTableLayout.plan(spec, limits) for spec in specs]
        self.pools = [BlockPool(num_blocks) for _ in specs]
        self.cache = PrefixCache(self.layouts, self.pools)

    def hashes(self, tokens: Sequence[int]) -> TokenHashes:
        """Return the hashes of tokens."""
        return _hash(self.cache.hashes(), tokens)

    def start(self, tokens: Sequence[int]) -> _Row:
        """Begin a request with what is cached of its tokens."""
        row = _Row(list(tokens), self.hashes(tokens))
        row.num_computed = self.cache.longest(row.hashes, len(tokens) - 1)
        row.block_ids = [ids.tolist() for ids in self.cache.acquire(row.hashes, row.num_computed)]
        return row

    def chunk(self, row: _Row, end: int, *, decodes: bool = False) -> None:
        """Compute a request's tokens up to ``end`` in one step, or in a step for each."""
        for layout, pool, ids in zip(self.layouts, self.pools, row.block_ids, strict=True):
            missing = layout.num_blocks(end) - len(ids)
            if layout.kind == "mamba":
                # a chunk leaves one state, at its end
                ids += [NULL_BLOCK] * (missing - 1)
                missing = min(missing, 1)
            ids += pool.allocate(max(missing, 0)).tolist()
        step, tables = self.cache.step, [np.array([ids], np.int32) for ids in row.block_ids]
        start = row.num_computed - row.num_computed % step
        for boundary in range(start + step, end + 1, step):
            has_state = decodes or boundary == end
            self.cache.keep(row.hashes, boundary, 0, tables, has_state=has_state)
        row.num_computed = end
        for layout, pool, ids in zip(self.layouts, self.pools, row.block_ids, strict=True):
            num_dead = min(layout.num_expired_blocks(end), len(ids))
            pool.release(ids[:num_dead], last_step=0)
            ids[:num_dead] = [NULL_BLOCK] * num_dead

    def compute(self, tokens: Sequence[int], *ends: int) -> _Row:
        """Begin a request and compute it in chunks with these ends, then to its own."""
        row = self.start(tokens)
        for end in [*(end for end in ends if end > row.num_computed), len(tokens)]:
            self.chunk(row, end)
        return row

    def chunk_end(self, start: int, count: int) -> int:
        return int(self.cache.chunk_ends(np.array([start]), np.array([count]))[0])

    def finish(self, row: _Row) -> None:
        for pool, ids in zip(self.pools, row.block_ids, strict=True):
            pool.release(ids, last_step=0)

    def hit(self, tokens: Sequence[int]) -> int:
        """Return what a request of these tokens would be spared; it does not start."""
        row = self.start(tokens)
        self.finish(row)
        return row.num_computed


class TestHitLength:
    @pytest.mark.parametrize(
        ("length", "hit"),
        [(1, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (100, 96)],
    )
    def test_whole_blocks_are_hit_and_the_last_token_is_computed(
        self, length: int, hit: int
    ) -> None:
        """A request needs logits of its last token, so that one is never spared."""
        cache = _Cache(FULL)
        cache.compute(range(100))
        assert cache.hit(range(length)) == hit

    @pytest.mark.parametrize("equal", [0, 15, 16, 17, 31, 32, 47, 48, 64])
    def test_a_hit_ends_where_the_tokens_differ(self, equal: int) -> None:
        cache = _Cache(FULL)
        cache.compute(range(64))
        other = [*range(equal), *range(1000, 1000 + 80 - equal)]
        assert cache.hit(other) == equal - equal % 16

    def test_equal_tokens_after_different_beginnings_are_not_hit(self) -> None:
        """A state depends on all tokens before it, so a hash names them, too."""
        cache = _Cache(FULL)
        cache.compute([*range(16), *range(500, 548)])
        cache.compute(range(900, 916))
        assert cache.hit([*range(900, 916), *range(500, 548)]) == 16

    def test_a_hit_ends_a_block_in_every_group(self) -> None:
        """A shared block that is half full would be written by whoever continues.

        https://github.com/vllm-project/vllm/issues/45238
        """
        cache = _Cache(AttentionSpec(block_size=16), AttentionSpec(block_size=24))
        cache.compute(range(200))
        assert cache.cache.unit == 48
        assert cache.hit(range(120)) == 96

    def test_a_window_needs_only_the_blocks_that_it_reaches(self) -> None:
        """The next token sees 32 tokens back: two blocks, and what is before them is null."""
        cache = _Cache(WINDOW)
        cache.compute(range(128), 64)
        row = cache.start(range(129))
        assert row.num_computed == 128
        assert row.block_ids[0][:6] == [NULL_BLOCK] * 6
        assert NULL_BLOCK not in row.block_ids[0][6:]

    @pytest.mark.parametrize("gone", [0, 1], ids=["first-of-the-window", "last-of-the-window"])
    def test_a_window_with_a_block_gone_is_not_hit(self, gone: int) -> None:
        """What is missing is the window's, wherever in it.

        https://github.com/vllm-project/vllm/issues/47861
        """
        cache = _Cache(WINDOW, num_blocks=30)
        row = cache.compute(range(96))
        cache.finish(row)
        blocks = row.block_ids[0][4:]
        keep = cache.pools[0]
        keep.acquire([blocks[1 - gone]])
        others = keep.allocate(keep.num_free)
        keep.release(others, last_step=0)
        keep.release([blocks[1 - gone]], last_step=0)
        assert cache.hit(range(97)) == 0

    def test_a_window_that_was_left_behind_can_be_hit_where_it_was(self) -> None:
        """Blocks behind a window are free, and findable until their room is needed."""
        cache = _Cache(FULL, WINDOW)
        cache.compute(range(320), 64, 128, 192)
        assert cache.hit([*range(130), 5]) == 128

    def test_a_state_is_hit_where_a_chunk_ended(self) -> None:
        cache = _Cache(STATES)
        cache.compute(range(200), 64, 128)
        assert cache.hit(range(200)) == 128
        assert cache.hit(range(100)) == 64
        assert cache.hit(range(64)) == 0

    @pytest.mark.parametrize("end", [63, 65, 70, 95])
    def test_a_state_in_the_middle_of_a_block_is_never_offered(self, end: int) -> None:
        """It is the state after fewer or more tokens than the block's end.

        https://github.com/vllm-project/vllm/issues/45100
        https://github.com/vllm-project/vllm/issues/51113
        """
        cache = _Cache(STATES)
        row = cache.start(range(200))
        cache.chunk(row, end)
        assert cache.hit(range(200)) == 0

    def test_a_state_that_a_chunk_passed_is_never_offered(self) -> None:
        """A chunk leaves one state, at its end; the columns before it hold none.

        https://github.com/vllm-project/vllm/issues/53479
        """
        cache = _Cache(STATES)
        cache.compute(range(96))
        assert cache.hit([*range(64), 7]) == 0
        assert cache.hit([*range(96), 7]) == 96

    def test_states_of_decode_steps_are_hit_at_every_block(self) -> None:
        cache = _Cache(STATES)
        row = cache.start(range(100))
        for end in range(1, 101):
            cache.chunk(row, end, decodes=True)
        assert [cache.hit(range(n)) for n in (33, 65, 97)] == [32, 64, 96]

    def test_groups_agree_on_the_shortest(self) -> None:
        """A hit is cut to what every group has, and then looked at again in each.

        https://github.com/vllm-project/vllm/issues/45477
        """
        cache = _Cache(FULL, WINDOW, STATES)
        cache.compute(range(300), 64, 100, 192)
        assert cache.hit(range(300)) == 192
        assert cache.hit(range(150)) == 64

    @pytest.mark.parametrize(
        ("spec", "reason"),
        [
            pytest.param(RingSpec(block_size=16), "'other' is a ring", id="ring"),
            pytest.param(MambaSpec(block_size=16), 'Mamba mode "none"', id="one-state"),
        ],
    )
    def test_a_group_that_keeps_nothing_of_a_prefix_says_so(
        self, spec: CacheSpec, reason: str
    ) -> None:
        """With one of them nothing is hit in any group.

        https://github.com/vllm-project/vllm/issues/57610
        """
        layouts = [BlockTableLayout.plan(one, LIMITS) for one in (FULL, spec)]
        pools = [BlockPool(9), BlockPool(9)]
        cache = PrefixCache(layouts, pools, ["full", "other"])
        assert cache.reason_for_none is not None
        assert reason in cache.reason_for_none
        hashes = _hash(cache.hashes(), range(64))
        blocks = [pool.allocate(4)[None] for pool in pools]
        cache.keep(hashes, 64, 0, blocks, has_state=True)
        assert cache.longest(hashes, 64) == 0

    def test_blocks_of_shards_hold_the_tokens_of_all_ranks(self) -> None:
        limits = ServingLimits(
            max_model_len=4096,
            max_num_reqs=4,
            max_num_batched_tokens=4096,
            context_parallel=ContextParallel(size=3, rank=1),
        )
        cache = _Cache(FULL, WINDOW, limits=limits)
        cache.compute(range(200))
        assert cache.cache.unit == 48
        row = cache.start(range(120))
        assert row.num_computed == 96
        assert [len(ids) for ids in row.block_ids] == [2, 6]

    def test_all_ranks_name_blocks_alike(self) -> None:
        """They look up the same hits, each in its own pool."""
        names = []
        for rank in range(2):
            parallel = ContextParallel(size=2, rank=rank)
            limits = ServingLimits(
                max_model_len=512,
                max_num_reqs=1,
                max_num_batched_tokens=64,
                context_parallel=parallel,
            )
            hashes = _Cache(FULL, limits=limits).hashes(range(64))
            names.append([hashes.at(32), hashes.at(64)])
        assert names[0] == names[1]


class TestSharing:
    def test_a_hit_holds_its_blocks(self) -> None:
        """Whoever computed them may end, and they stay."""
        cache = _Cache(FULL, num_blocks=12)
        first = cache.compute(range(64))
        second = cache.start(range(65))
        cache.finish(first)
        assert second.block_ids[0] == first.block_ids[0]
        cache.pools[0].allocate(cache.pools[0].num_free)
        assert cache.hit(range(65)) == 64

    def test_a_hit_is_taken_only_where_it_is_whole(self) -> None:
        cache = _Cache(FULL, num_blocks=12)
        row = cache.compute(range(64))
        cache.finish(row)
        cache.pools[0].allocate(9)
        # the two blocks that were needed least went first
        assert cache.hit(range(65)) == 32

    def test_hits_of_requests_that_come_back_are_counted_apart(self) -> None:
        cache = _Cache(FULL).cache
        cache.count_hit(64, is_again=False)
        cache.count_hit(64, is_again=True)
        cache.count_hit(64, is_again=True)
        assert (cache.hit_tokens, cache.rehit_tokens) == (64, 128)


class TestChunkEnds:
    @pytest.mark.parametrize("start", [0, 1, 31, 32, 33])
    @pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 100])
    def test_a_chunk_ends_where_the_layout_says(self, start: int, count: int) -> None:
        cache = _Cache(STATES)
        assert cache.chunk_end(start, count) == cache.layouts[0].chunk_end(start, count)

    def test_without_states_a_chunk_ends_anywhere(self) -> None:
        assert _Cache(FULL, WINDOW).chunk_end(3, 50) == 53

    def test_a_chunk_ends_where_all_groups_can_be_hit(self) -> None:
        """A state that stands at no block's end of another group could never be hit."""
        cache = _Cache(AttentionSpec(block_size=48), STATES)
        assert cache.chunk_end(0, 190) == 96
        assert cache.chunk_end(96, 90) == 186


class TestTokenHashes:
    def test_hashes_do_not_depend_on_how_the_tokens_arrived(self) -> None:
        tokens = range(40)
        whole, parts = _hash(TokenHashes(b"root", 4), tokens), TokenHashes(b"root", 4)
        for end in (1, 4, 7, 9, 30, 40):
            _hash(parts, tokens[:end])
        assert [whole.at(n) for n in range(4, 41, 4)] == [parts.at(n) for n in range(4, 41, 4)]

    def test_a_hash_names_root_tokens_and_their_order(self) -> None:
        def name(root: bytes, tokens: list[int]) -> bytes:
            return _hash(TokenHashes(root, 2), tokens).at(len(tokens))

        names = [
            name(b"root", [1, 2]),
            name(b"other", [1, 2]),
            name(b"root", [2, 1]),
            name(b"root", [1, 2 + 2**16]),
            name(b"root", [1, 2, 1, 2]),
            name(b"root", [3, 4, 1, 2]),
        ]
        assert len(set(names)) == len(names)

    def test_hashes_of_a_failed_step_start_anew(self) -> None:
        """Tokens may have been hashed without a hash of them having been kept."""
        hashes = _hash(TokenHashes(b"root", 2), [1, 2, 3, 4])
        expected = [hashes.at(2), hashes.at(4)]
        hashes._running.update(b"half a step")
        hashes.restart()
        assert hashes.num_hashed == 0
        _hash(hashes, [1, 2, 3, 4])
        assert [hashes.at(2), hashes.at(4)] == expected

    def test_other_plans_have_other_names(self) -> None:
        """A block of another kind of cache holds other states of the same tokens."""
        roots = []
        for specs in ([FULL], [FULL, WINDOW], [AttentionSpec(block_size=16, sharded=False)]):
            roots.append(_Cache(*specs).hashes(range(16)).at(16))
        assert len(set(roots)) == 3


class TestTraceHashes:
    def test_a_prefix_inside_an_id_has_a_name_of_its_own(self) -> None:
        hashes = TraceHashes([5, 6], 512, 1000)
        assert hashes.num_hashed == 1000
        names = [hashes.at(n) for n in (16, 32, 512, 528, 992)]
        assert len(set(names)) == 5

    def test_equal_ids_after_different_beginnings_are_not_the_same(self) -> None:
        first, second = TraceHashes([1, 2, 3], 16, 48), TraceHashes([9, 2, 3], 16, 48)
        assert not {first.at(n) for n in (16, 32, 48)} & {second.at(n) for n in (16, 32, 48)}

    @pytest.mark.parametrize(("ids", "length", "named"), [([1], 40, 16), ([1, 2], 20, 20)])
    def test_only_tokens_that_have_an_id_have_a_name(
        self, ids: list[int], length: int, named: int
    ) -> None:
        assert TraceHashes(ids, 16, length).num_hashed == named

    def test_ids_that_read_alike_are_told_apart(self) -> None:
        assert TraceHashes([1, 11], 1, 2).at(2) != TraceHashes([11, 1], 1, 2).at(2)


def _brute_force(cache: _Cache, hashes: PrefixHashes, max_tokens: int) -> int:
    """Try every length, the longest first, and look at every token that a group reads."""
    for length in range(max_tokens, 0, -1):
        if all(
            _can_continue(layout, pool, hashes, length)
            for layout, pool in zip(cache.layouts, cache.pools, strict=True)
        ):
            return length
    return 0


def _can_continue(
    layout: BlockTableLayout, pool: BlockPool, hashes: PrefixHashes, length: int
) -> bool:
    size = layout.tokens_per_block
    if length % size:
        return False
    spec = layout.spec
    if isinstance(spec, MambaSpec):
        return pool.lookup(hashes.at(length)) is not None
    first_read = 0
    if isinstance(spec, SlidingWindowSpec):
        first_read = max(length + 1 - spec.window - spec.extra_retained_tokens, 0)
    blocks = {position // size for position in range(first_read, length)}
    return all(pool.lookup(hashes.at((block + 1) * size)) is not None for block in blocks)


_SPECS: list[list[CacheSpec]] = [
    [AttentionSpec(block_size=4)],
    [SlidingWindowSpec(block_size=4, window=1)],
    [SlidingWindowSpec(block_size=4, window=9, extra_retained_tokens=3)],
    [MambaSpec(block_size=8, mode="align")],
    [AttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, window=10)],
    [AttentionSpec(block_size=6), MambaSpec(block_size=4, mode="align")],
    [
        SlidingWindowSpec(block_size=4, window=7),
        MambaSpec(block_size=8, mode="align"),
        AttentionSpec(block_size=2),
        SlidingWindowSpec(block_size=8, window=20),
    ],
]


@pytest.mark.parametrize("seed", range(60))
def test_hits_are_those_of_a_search_through_all_kept_blocks(seed: int) -> None:
    """Random conversations over pools so small that blocks go, with holes in every group."""
    draw = random.Random(seed)
    cache = _Cache(*_SPECS[seed % len(_SPECS)], num_blocks=draw.choice([60, 90, 150]))
    texts = [[draw.randrange(2) for _ in range(draw.randint(40, 90))] for _ in range(4)]
    num_hits = 0
    for _ in range(60):
        text = draw.choice(texts)
        tokens = text[: draw.randint(1, len(text))] + [
            draw.randrange(2) for _ in range(draw.randint(0, 20))
        ]
        expected = _brute_force(cache, cache.hashes(tokens), len(tokens) - 1)
        row = cache.start(tokens)
        assert row.num_computed == expected
        num_hits += expected > 0
        while row.num_computed < len(tokens):
            count = draw.randint(1, len(tokens) - row.num_computed)
            asks = draw.random() < 0.7
            end = cache.chunk_end(row.num_computed, count) if asks else None
            cache.chunk(row, row.num_computed + count if end is None else end)
        cache.finish(row)
        for pool in cache.pools:
            if draw.random() < 0.3:
                # blocks of somebody else push some out, in one group and not in another
                pool.release(pool.allocate(draw.randint(0, pool.num_free)), last_step=0)
    assert num_hits > 0
