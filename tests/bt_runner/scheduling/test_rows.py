"""Which blocks a request's rows need for a step, and which they give back."""

import pytest

from bt_runner.errors import BadInputError, RequestRefusedError
from bt_runner.scheduling.request import Request, SamplingParams
from bt_runner.scheduling.rows import NullPrefix, RequestRows
from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    MambaSpec,
    ServingLimits,
    SlidingWindowSpec,
)


def _rows(*specs: CacheSpec, num_blocks: int = 20, num_drafts: int = 0) -> RequestRows:
    limits = ServingLimits(
        max_model_len=512,
        max_num_reqs=2,
        max_num_batched_tokens=64,
        num_speculative_tokens=num_drafts,
    )
    layouts = [BlockTableLayout.plan(spec, limits) for spec in specs]
    return RequestRows(layouts, [num_blocks] * len(layouts))


def _request(rows: RequestRows, prompt_len: int = 8, max_new_tokens: int = 8) -> Request:
    request = Request(
        request_id="a",
        prompt_len=prompt_len,
        params=SamplingParams(max_new_tokens=max_new_tokens),
        tokens=list(range(prompt_len)),
        row=0,
    )
    request.block_ids = [[] for _ in rows.layouts]
    return request


def test_rows_grow_by_what_a_step_adds() -> None:
    """Blocks already held are not asked for again."""
    rows = _rows(AttentionSpec(block_size=4), AttentionSpec(block_size=16))
    request = _request(rows)
    assert rows.extend(request, 5) == [[1, 2], [1]]
    assert rows.extend(request, 8) == [[], []]
    assert rows.extend(request, 9) == [[3], []]
    assert request.block_ids == [[1, 2, 3], [1]]


def test_one_pool_that_is_short_leaves_all_pools_alone() -> None:
    """All groups or none: a request with half its rows could not run."""
    rows = _rows(AttentionSpec(block_size=64), AttentionSpec(block_size=4), num_blocks=3)
    request = _request(rows)
    assert rows.extend(request, 12) is None
    assert [pool.num_used for pool in rows.pools] == [0, 0]
    assert request.block_ids == [[], []]


def test_states_that_a_step_skips_get_no_block() -> None:
    """A chunk over several columns reads one state and writes one: the rest is null."""
    rows = _rows(MambaSpec(block_size=8, mode="align"))
    request = _request(rows)
    assert rows.extend(request, 6) == [[1]]
    request.num_computed = 6
    assert rows.extend(request, 40) == [[0, 0, 0, 2]]


def test_a_state_that_nothing_reads_any_more_goes_back() -> None:
    """Its column becomes null in the same breath."""
    rows = _rows(MambaSpec(block_size=8, mode="align"))
    request = _request(rows)
    rows.extend(request, 6)
    rows.extend(request, 40)
    request.num_computed = 40
    assert rows.trim(request, last_step=0) == [NullPrefix(row=0, group=0, num_blocks=4)]
    assert request.block_ids == [[0, 0, 0, 0, 2]]
    assert rows.pools[0].num_used == 1
    assert rows.trim(request, last_step=0) == []


@pytest.mark.parametrize("chunk", [3, 4, 9, 30])
def test_drafts_states_move_along_and_are_never_more_than_reserved(chunk: int) -> None:
    """A step reads one state, and writes one and its drafts': ``max_resident_blocks`` in all."""
    rows = _rows(MambaSpec(block_size=4, mode="align", num_speculative_blocks=3), num_drafts=3)
    (layout,), (pool,) = rows.layouts, rows.pools
    request = _request(rows, prompt_len=3)
    seq_len = 0
    for step in range(12):
        request.num_computed = seq_len
        rows.trim(request, last_step=0)
        seq_len += chunk if step < 6 else 4
        before = list(request.block_ids[0])
        source = before[layout.state_column(request.num_computed)] if before else None
        new_ids = rows.extend(request, seq_len)
        (held,) = request.block_ids
        assert new_ids is not None
        assert held in (before + new_ids[0], new_ids[0])
        assert len(held) == layout.num_blocks(seq_len)
        written = layout.state_column(seq_len)
        assert all(held[written : written + 4])
        assert source is None or held[layout.state_column(request.num_computed)] == source
        assert pool.num_used == len(set(held) - {0}) <= layout.max_resident_blocks(64)


def test_c7_blocks_behind_the_window_go_back_and_their_columns_become_null() -> None:
    """256 tokens, a window of 128 and blocks of 32: four leading blocks."""
    rows = _rows(SlidingWindowSpec(block_size=32, window=128))
    request = _request(rows)
    rows.extend(request, 256)
    request.num_computed = 256
    assert rows.trim(request, last_step=0) == [NullPrefix(row=0, group=0, num_blocks=4)]
    assert request.block_ids == [[0, 0, 0, 0, 5, 6, 7, 8]]
    assert rows.pools[0].num_free == 15


def test_all_blocks_go_back_at_once() -> None:
    """Null columns hold none."""
    rows = _rows(AttentionSpec(block_size=4), MambaSpec(block_size=4, mode="align"))
    request = _request(rows)
    rows.extend(request, 30)
    rows.release(request, last_step=0)
    assert [pool.num_used for pool in rows.pools] == [0, 0]


def test_a_request_that_outgrows_a_pool_is_refused_with_the_numbers() -> None:
    """It says the group, the need and what there is."""
    rows = _rows(AttentionSpec(block_size=4), num_blocks=4)
    with pytest.raises(RequestRefusedError, match="needs 4 blocks of group 0 for 16 tokens") as hit:
        rows.require_room(_request(rows))
    assert hit.value.facts == {"group": 0, "needed": 4, "capacity": 3}


def test_states_further_apart_than_a_step_are_required() -> None:
    """A decode that jumps two columns would leave states that nobody frees."""
    with pytest.raises(BadInputError, match="make the Mamba block size at least 6"):
        _rows(MambaSpec(block_size=4, mode="align", num_speculative_blocks=5), num_drafts=5)
