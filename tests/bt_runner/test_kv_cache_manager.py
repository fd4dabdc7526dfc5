"""Which blocks rows need for a step, which they give back, and what tables are told."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.support.plain_rows import PlainRow

from bt_runner.errors import BadInputError, RequestRefusedError
from bt_runner.kv_cache_manager import GroupBlocks, KVCacheManager, TableEdits
from bt_runner.requests import Request, SamplingParams
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


def _limits(num_drafts: int = 0, size: int = 1) -> ServingLimits:
    return ServingLimits(
        max_model_len=512,
        max_num_reqs=4,
        max_num_batched_tokens=64,
        num_speculative_tokens=num_drafts,
        context_parallel=ContextParallel(size=size),
    )


def _manager(*specs: CacheSpec, num_blocks: int = 20, num_drafts: int = 0) -> KVCacheManager:
    layouts = [BlockTableLayout.plan(spec, _limits(num_drafts)) for spec in specs]
    return KVCacheManager(layouts, [num_blocks] * len(layouts))


def _allocate(kv: KVCacheManager, row: int, num_computed: int, seq_len: int) -> bool:
    return bool(kv.allocate(np.array([row]), np.array([num_computed]), np.array([seq_len])))


def _advance(kv: KVCacheManager, row: int, num_computed: int) -> None:
    kv.advance(np.array([row]), np.array([num_computed]), last_step=0)


KINDS = [
    pytest.param(AttentionSpec(block_size=16), 1, id="attention"),
    pytest.param(AttentionSpec(block_size=16), 3, id="sharded"),
    pytest.param(SlidingWindowSpec(block_size=8, window=20), 1, id="window"),
    pytest.param(MambaSpec(block_size=8, mode="none", num_speculative_blocks=2), 1, id="state"),
    pytest.param(MambaSpec(block_size=8, mode="align", num_speculative_blocks=2), 1, id="states"),
    pytest.param(RingSpec(block_size=8), 1, id="ring"),
]


@pytest.mark.parametrize(("spec", "size"), KINDS)
def test_all_lengths_at_once_need_what_the_layout_says_of_each(spec: CacheSpec, size: int) -> None:
    """The contract counts in ints, one length at a time."""
    layout = BlockTableLayout.plan(spec, _limits(size=size))
    group = GroupBlocks(layout, 50)
    lengths = np.arange(1, 513)
    assert group.num_blocks(lengths).tolist() == [layout.num_blocks(n) for n in lengths.tolist()]


def test_rows_grow_by_what_a_step_adds() -> None:
    """Blocks already held are not asked for again."""
    kv = _manager(AttentionSpec(block_size=4), AttentionSpec(block_size=16))
    for seq_len in (5, 8, 9):
        assert _allocate(kv, 0, 0, seq_len)
    first, second = (kv.block_ids_of(0, group) for group in (0, 1))
    assert (len(set(first)), len(second)) == (3, 1)
    assert 0 not in first + second


def test_one_pool_that_is_short_leaves_all_pools_alone() -> None:
    """All groups or none: a request with half its rows could not run."""
    kv = _manager(AttentionSpec(block_size=64), AttentionSpec(block_size=4), num_blocks=3)
    assert not _allocate(kv, 0, 0, 12)
    assert [pool.num_used for pool in kv.pools] == [0, 0]
    assert kv.block_ids_of(0, 0) == []


def test_the_first_rows_are_served_and_the_others_get_nothing() -> None:
    """Whichever group is the first to be short."""
    kv = _manager(AttentionSpec(block_size=4), AttentionSpec(block_size=8), num_blocks=6)
    rows, lengths = np.array([2, 0, 3]), np.array([9, 8, 5])
    assert kv.allocate(rows, 0 * lengths, lengths) == 2
    assert [len(kv.block_ids_of(row, 0)) for row in (2, 0, 3)] == [3, 2, 0]
    assert [len(kv.block_ids_of(row, 1)) for row in (2, 0, 3)] == [2, 1, 0]


def test_states_that_a_step_skips_get_no_block() -> None:
    """A chunk over several columns reads one state and writes one: the rest is null."""
    kv = _manager(MambaSpec(block_size=8, mode="align"))
    _allocate(kv, 0, 0, 6)
    _allocate(kv, 0, 6, 40)
    assert [block > 0 for block in kv.block_ids_of(0, 0)] == [True, False, False, False, True]


def test_blocks_behind_the_window_go_back_and_their_columns_become_null() -> None:
    """256 tokens, a window of 128 and blocks of 32: four leading blocks."""
    kv = _manager(SlidingWindowSpec(block_size=32, window=128))
    _allocate(kv, 0, 0, 256)
    _advance(kv, 0, 256)
    assert kv.take_edits().null_prefixes == [(0, 0, 4)]
    assert [block > 0 for block in kv.block_ids_of(0, 0)] == [False] * 4 + [True] * 4
    assert kv.pools[0].num_free == 15
    _advance(kv, 0, 256)
    assert kv.take_edits().null_prefixes == []


def test_all_blocks_go_back_at_once() -> None:
    """Null columns hold none, and the tables are told to clear the row."""
    kv = _manager(AttentionSpec(block_size=4), MambaSpec(block_size=4, mode="align"))
    _allocate(kv, 1, 0, 30)
    kv.release(np.array([1]), last_step=0)
    assert [pool.num_used for pool in kv.pools] == [0, 0]
    edits = kv.take_edits()
    assert (edits.cleared, len(edits.rows)) == ([1], 0)


def test_tables_are_told_row_by_row_and_within_a_row_group_by_group() -> None:
    """And once."""
    kv = _manager(AttentionSpec(block_size=4), AttentionSpec(block_size=8))
    rows, lengths = np.array([2, 0]), np.array([9, 8])
    kv.allocate(rows, 0 * lengths, lengths)
    edits = kv.take_edits()
    assert edits.rows.tolist() == [0, 2]
    assert edits.counts.tolist() == [[2, 1], [3, 2]]
    expected = [kv.block_ids_of(row, group) for row in (0, 2) for group in (0, 1)]
    assert edits.block_ids.tolist() == [block for ids in expected for block in ids]
    assert len(kv.take_edits().rows) == 0


@pytest.mark.parametrize("seed", range(30))
def test_many_rows_at_once_hold_what_each_would_alone(seed: int) -> None:
    """Against one row and one column at a time, rejected drafts and preemption included."""
    draw = random.Random(seed)
    num_drafts = draw.choice([0, 2, 3])
    specs: list[CacheSpec] = [
        AttentionSpec(block_size=4),
        SlidingWindowSpec(block_size=4, window=9),
        MambaSpec(block_size=4, mode="align", num_speculative_blocks=num_drafts),
        MambaSpec(block_size=4, num_speculative_blocks=num_drafts),
    ]
    kv = _manager(*specs, num_blocks=400, num_drafts=num_drafts)
    layouts = [group.layout for group in kv.groups]
    plain = {row: [PlainRow(layout) for layout in layouts] for row in range(4)}
    told: dict[int, list[list[int]]] = {row: [[] for _ in layouts] for row in range(4)}
    computed = dict.fromkeys(range(4), 0)
    for _ in range(60):
        rows = np.array(draw.sample(range(4), draw.randint(1, 4)))
        taken = np.array([draw.choice([1, 1 + num_drafts, 9]) for _ in rows])
        starts = np.array([computed[row] for row in rows.tolist()])
        assert kv.allocate(rows, starts, starts + taken) == len(rows)
        for row, start, count in zip(rows.tolist(), starts.tolist(), taken.tolist(), strict=True):
            for of_group in plain[row]:
                of_group.extend(start, start + count)
        edits = kv.take_edits()
        _tell(told, edits)
        for row, count in zip(rows.tolist(), taken.tolist(), strict=True):
            computed[row] += draw.randint(1, count) if count <= 1 + num_drafts else count
            kv.advance(np.array([row]), np.array([computed[row]]), last_step=0)
            for of_group in plain[row]:
                of_group.trim(computed[row])
        for row in range(4):
            shapes = [[block > 0 for block in kv.block_ids_of(row, g)] for g in range(len(layouts))]
            assert shapes == [of_group.is_held for of_group in plain[row]]
        if draw.random() < 0.1 or max(computed.values()) > 480:
            row = max(computed, key=lambda row: computed[row])
            kv.release(np.array([row]), last_step=0)
            computed[row] = 0
            plain[row] = [PlainRow(layout) for layout in layouts]
        _tell(told, kv.take_edits())
        for row in range(4):
            assert told[row] == [kv.block_ids_of(row, g) for g in range(len(layouts))]
    for pool, group in zip(kv.pools, range(len(layouts)), strict=True):
        held = [block for row in range(4) for block in kv.block_ids_of(row, group) if block]
        assert len(held) == len(set(held)) == pool.num_used


def _tell(told: dict[int, list[list[int]]], edits: TableEdits) -> None:
    """Carry out edits as tables do."""
    null_prefixes, cleared, rows, counts, block_ids = edits
    for row, group, num_blocks in null_prefixes:
        told[row][group][:num_blocks] = [0] * num_blocks
    for row in cleared:
        told[row] = [[] for _ in told[row]]
    ids = iter(block_ids.tolist())
    for row, of_row in zip(rows.tolist(), counts.tolist(), strict=True):
        for group, count in enumerate(of_row):
            told[row][group] += [next(ids) for _ in range(count)]


def test_a_request_that_outgrows_a_pool_is_refused_with_the_numbers() -> None:
    """It says the group, the need and what there is."""
    kv = _manager(AttentionSpec(block_size=4), num_blocks=4)
    request = Request("a", np.zeros(8, np.int32), SamplingParams(max_new_tokens=8))
    with pytest.raises(RequestRefusedError, match="needs 4 blocks of group 0 for 16 tokens") as hit:
        kv.require_room(request)
    assert hit.value.details == {"group": 0, "needed": 4, "capacity": 3}


def test_states_further_apart_than_a_step_are_required() -> None:
    """A decode that jumps two columns would leave states that are never freed."""
    with pytest.raises(BadInputError, match="make the Mamba block size at least 6"):
        _manager(MambaSpec(block_size=4, mode="align", num_speculative_blocks=5), num_drafts=5)
