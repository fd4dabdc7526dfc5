"""Rows begin with shared blocks, and shared blocks that nobody holds make room for new ones."""

from __future__ import annotations

from bt_runner.replay.sharing.rows import SharedRows
from bt_runner.scheduling.request import Request, SamplingParams
from bt_width import AttentionSpec, BlockTableLayout, ServingLimits

LIMITS = ServingLimits(max_model_len=8192, max_num_reqs=4, max_num_batched_tokens=8192)
LAYOUT = BlockTableLayout.plan(AttentionSpec(block_size=512), LIMITS)


def _rows(num_blocks: int) -> SharedRows:
    return SharedRows([LAYOUT], [num_blocks])


def _started(rows: SharedRows, name: str, hash_ids: list[int], prompt_len: int) -> Request:
    request = Request(name, prompt_len, SamplingParams(), [0] * prompt_len)
    rows.name_prefix(request, hash_ids)
    rows.start(request)
    return request


def _ended(rows: SharedRows, name: str, hash_ids: list[int], prompt_len: int) -> list[int]:
    """Run a request over its prompt to its end; return the blocks it had."""
    request = _started(rows, name, hash_ids, prompt_len)
    rows.extend(request, prompt_len)
    rows.offer(request, prompt_len)
    (blocks,) = request.block_ids
    rows.release(request, last_step=1)
    rows.forget(request)
    rows.complete(1)
    return list(blocks)


def test_a_request_begins_after_what_it_shares() -> None:
    rows = _rows(9)
    blocks = _ended(rows, "first", [1, 2], 1024)

    second = _started(rows, "second", [1, 2, 3], 1300)

    assert second.block_ids == [blocks]
    assert second.num_computed == 1024


def test_blocks_that_nobody_holds_make_room() -> None:
    rows = _rows(4)
    _ended(rows, "first", [1, 2, 3], 1536)
    other = _started(rows, "other", [], 1024)

    new_block_ids = rows.extend(other, 1024)

    assert new_block_ids is not None
    assert len(new_block_ids[0]) == 2
    assert rows.prefixes.num_idle == 1


def test_room_that_would_not_do_is_not_made() -> None:
    rows = _rows(4)
    _ended(rows, "first", [1, 2, 3], 1536)
    other = _started(rows, "other", [], 2048)

    assert rows.extend(other, 2048) is None
    assert rows.prefixes.num_idle == 3


def test_a_request_that_did_not_get_in_was_spared_nothing() -> None:
    rows = _rows(4)
    blocks = _ended(rows, "first", [1, 2], 1024)
    second = _started(rows, "second", [1, 2, 3, 4], 2048)

    refused = rows.extend(second, 2048)
    rows.release(second, last_step=1)

    assert refused is None
    assert rows.prefixes.hit_tokens == 0
    assert [rows.pools[0].references(block) for block in blocks] == [1, 1]


def test_what_is_shared_is_counted_when_its_request_runs() -> None:
    rows = _rows(9)
    _ended(rows, "first", [1, 2], 1024)

    _ended(rows, "second", [1, 2, 3], 1300)

    assert rows.prefixes.hit_tokens == 1024
