"""Which requests compute how many tokens in the next step."""

from collections import deque
from typing import Any

import numpy as np
import pytest

from bt_runner.errors import RequestRefusedError
from bt_runner.kv_cache_manager import KVCacheManager, pool_sizes
from bt_runner.requests import Request, SamplingParams
from bt_runner.scheduler import Scheduler, SchedulerOutput
from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    MambaSpec,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
)


def _scheduler(num_blocks: int = 50, **changes: Any) -> Scheduler:
    numbers = {"max_model_len": 64, "max_num_reqs": 3, "max_num_batched_tokens": 8} | changes
    limits = ServingLimits(**numbers)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=4, token_alignment=None), limits)
    return Scheduler(limits, KVCacheManager([layout], [num_blocks]))


def _request(name: str, prompt_len: int, max_new_tokens: int = 4) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return Request(name, np.arange(prompt_len, dtype=np.int32), params)


def _batch(batch: SchedulerOutput) -> list[tuple[str, int, int]]:
    names = [request.request_id for request in batch.requests]
    return list(zip(names, batch.starts.tolist(), batch.num_tokens.tolist(), strict=True))


def _step(scheduler: Scheduler, step: int = 0) -> SchedulerOutput:
    batch = scheduler.schedule(step)
    scheduler.kv.take_edits()
    scheduler.launched(batch, step)
    chosen = np.full(int(batch.num_choices.sum()), 99, np.int32)
    scheduler.update(batch, scheduler.verify(batch, chosen), step)
    return batch


def test_prompts_are_cut_to_what_a_step_may_hold() -> None:
    """First come, first served: the second starts with what the first leaves."""
    scheduler = _scheduler()
    scheduler.add(_request("a", 11))
    scheduler.add(_request("b", 6))
    assert _batch(_step(scheduler)) == [("a", 0, 8)]
    assert _batch(_step(scheduler)) == [("a", 8, 3), ("b", 0, 5)]
    assert _batch(_step(scheduler)) == [("a", 11, 1), ("b", 5, 1)]


def test_decodes_stand_before_prefills() -> None:
    """Builders split a batch at the first that prefills."""
    scheduler = _scheduler()
    scheduler.add(_request("a", 20, 8))
    scheduler.add(_request("b", 2))
    plans = [_step(scheduler) for _ in range(4)]
    assert _batch(plans[2]) == [("a", 16, 4), ("b", 0, 2)]
    scheduler.add(_request("c", 30))
    assert _step(scheduler).is_prefilling.tolist() == [False, False, True]


def test_requests_wait_for_a_row() -> None:
    """There are as many rows as requests may run."""
    scheduler = _scheduler(max_num_reqs=1)
    scheduler.add(_request("a", 1, 2))
    scheduler.add(_request("b", 1, 2))
    assert _batch(_step(scheduler)) == [("a", 0, 1)]
    assert _batch(_step(scheduler)) == [("a", 1, 1)]
    batch = scheduler.schedule(0)
    assert _batch(batch) == [("b", 0, 1)]
    assert scheduler.kv.take_edits().cleared == [0]


def test_the_latest_request_gives_up_its_blocks() -> None:
    """It keeps its tokens, and starts over when there is room."""
    scheduler = _scheduler(num_blocks=6)
    scheduler.add(_request("a", 7, 8))
    victim = _request("b", 6, 8)
    scheduler.add(victim)
    assert _batch(_step(scheduler)) == [("a", 0, 7), ("b", 0, 1)]
    for _ in range(20):
        batch = _step(scheduler)
        if scheduler.num_preemptions:
            break
    assert [request.request_id for request in batch.requests] == ["a"]
    assert (victim.row, victim.num_computed, victim.num_preemptions) == (None, 0, 1)
    assert list(scheduler.waiting) == [victim]
    while scheduler.requests:
        _step(scheduler)
    assert len(victim.output) == 8


def test_the_oldest_request_always_goes_on() -> None:
    """Whoever else is there: so something always ends, and nothing waits for ever."""
    scheduler = _scheduler(num_blocks=5)
    requests = [_request(name, 4, 12) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    for _ in range(200):
        if not scheduler.requests:
            break
        _step(scheduler)
    assert [len(request.output) for request in requests] == [12, 12, 12]


def test_no_request_is_preempted_while_blocks_are_on_their_way_back() -> None:
    """The request that lacks one waits a step, and no other overtakes it."""
    scheduler = _scheduler(num_blocks=4)
    first, second = _request("a", 4, 8), _request("b", 4, 8)
    scheduler.add(first)
    scheduler.add(second)
    assert len(_step(scheduler, 1).rows) == 2
    scheduler.abort(second, 5)
    scheduler.add(_request("c", 2))
    table = scheduler.table
    # it lacks two blocks, and one is free
    table.num_in_flight[first.row] = 1
    table.append(np.array([first.row]), np.full((1, 6), 9, np.int32), np.array([6]))
    batch = scheduler.schedule(5)
    assert (len(batch.rows), scheduler.num_preemptions) == (0, 0)
    scheduler.kv.complete(5)
    assert _batch(scheduler.schedule(5)) == [("a", 4, 7)]


def test_a_token_on_its_way_is_computed_next_but_not_after_the_last_one() -> None:
    """The host does not know it; the device does."""
    scheduler = _scheduler()
    scheduler.add(_request("a", 3, 2))
    first = scheduler.schedule(0)
    scheduler.launched(first, 1)
    second = scheduler.schedule(1)
    assert _batch(second) == [("a", 3, 1)]
    assert second.num_on_host.tolist() == [3]
    scheduler.launched(second, 2)
    assert len(scheduler.schedule(2).rows) == 0


def test_who_was_preempted_gets_the_token_that_was_on_its_way() -> None:
    """And who was aborted does not, whoever has the row by then."""
    scheduler = _scheduler(num_blocks=9)
    kept, gone = _request("a", 4, 9), _request("b", 4, 9)
    for each in (kept, gone):
        scheduler.add(each)
    batch = scheduler.schedule(0)
    scheduler.launched(batch, 1)
    scheduler.abort(gone, 1)
    scheduler._preempt(int(kept.row or 0), 1)
    scheduler.kv.complete(1)
    scheduler.add(_request("c", 2, 9))
    chosen = np.array([11, 12], np.int32)
    outputs = scheduler.update(batch, scheduler.verify(batch, chosen), 1)
    assert [(out.request_id, out.new_tokens) for out in outputs] == [("a", [11])]
    assert (kept.output, gone.output) == ([11], [])


def test_a_request_that_waits_can_be_taken_out() -> None:
    """It holds nothing to give back."""
    scheduler = _scheduler(max_num_reqs=1)
    for name in "ab":
        scheduler.add(_request(name, 3))
    _step(scheduler)
    scheduler.abort(scheduler.waiting[0], 0)
    assert not scheduler.waiting
    assert list(scheduler.requests) == ["a"]


def test_drafts_are_cut_to_the_room_that_is_left() -> None:
    """A step never computes past the end of its request."""
    scheduler = _scheduler(num_speculative_tokens=3)
    request = _request("a", 4, 3)
    scheduler.add(request)
    _step(scheduler)
    rows = scheduler.rows_to_draft()
    scheduler.table.set_drafts(rows, np.array([[7, 8, 9]], np.int32), np.array([3]))
    batch = scheduler.schedule(0)
    numbers = (batch.num_known, batch.num_drafts, batch.num_choices)
    assert [each.tolist() for each in numbers] == [[1], [2], [3]]
    positions = np.arange(4, 7)
    assert scheduler.table.read(np.repeat(rows, 3), positions).tolist() == [99, 7, 8]


@pytest.mark.parametrize(
    ("drafts", "chosen", "kept"),
    [
        pytest.param([], [4], [4], id="no-drafts"),
        pytest.param([4, 5], [4, 5, 6], [4, 5, 6], id="all-agree"),
        pytest.param([4, 5], [4, 7, 6], [4, 7], id="second-differs"),
        pytest.param([4, 5], [8, 5, 6], [8], id="first-differs"),
    ],
)
def test_drafts_are_kept_up_to_the_first_that_differs(
    drafts: list[int], chosen: list[int], kept: list[int]
) -> None:
    """What the model chose in its place is kept too; what follows was computed in vain."""
    scheduler = _scheduler(num_speculative_tokens=3)
    request = _request("a", 4, 20)
    scheduler.add(request)
    _step(scheduler)
    if drafts:
        given = np.array([drafts], np.int32)
        scheduler.table.set_drafts(scheduler.rows_to_draft(), given, np.array([len(drafts)]))
    batch = scheduler.schedule(0)
    scheduler.launched(batch, 1)
    scheduler.update(batch, scheduler.verify(batch, np.array(chosen, np.int32)), 1)
    assert request.output == [99, *kept]
    assert request.num_computed == 4 + len(kept)


@pytest.mark.parametrize(
    ("prompt_len", "max_new_tokens", "message"),
    [
        pytest.param(0, 4, "must be at least 1", id="no-prompt"),
        pytest.param(4, 0, "must be at least 1", id="nothing-to-do"),
        pytest.param(60, 5, "more than max_model_len 64", id="one-too-long"),
    ],
)
def test_a_request_that_can_never_end_is_refused(
    prompt_len: int, max_new_tokens: int, message: str
) -> None:
    """At once, and with the numbers."""
    scheduler = _scheduler()
    with pytest.raises(RequestRefusedError, match=message):
        scheduler.add(_request("a", prompt_len, max_new_tokens))
    assert not scheduler.waiting


def test_a_full_prompt_leaves_no_room_for_a_token() -> None:
    """Its first token would lie one column past the row.

    Reported as https://github.com/GeeeekExplorer/nano-vllm/pull/258
    """
    scheduler = _scheduler(max_model_len=16)
    scheduler.add(_request("fits", 15, 1))
    with pytest.raises(RequestRefusedError, match="16 prompt tokens and wants 1 new"):
        scheduler.add(_request("full", 16, 1))


def test_starting_over_returns_every_block_and_keeps_the_order() -> None:
    """After a failed step, the requests run again as they came."""
    scheduler = _scheduler()
    for name in "ab":
        scheduler.add(_request(name, 3))
    scheduler.schedule(0)
    scheduler.start_over(0)
    assert [request.request_id for request in scheduler.waiting] == ["a", "b"]
    assert _batch(scheduler.schedule(0)) == [("a", 0, 3), ("b", 0, 3)]
    assert scheduler.kv.take_edits().cleared == [0, 1, 2]


def _run_alone(spec: CacheSpec, steps_in_flight: int) -> int:
    """Run the longest request in pools of the default size, and count the steps it waited for."""
    limits = ServingLimits(max_model_len=128, max_num_reqs=1, max_num_batched_tokens=16)
    layout = BlockTableLayout.plan(spec, limits)
    sizes = pool_sizes([layout], None, steps_in_flight=steps_in_flight)
    scheduler = Scheduler(limits, KVCacheManager([layout], sizes, prefix_caching=True))
    scheduler.add(_request("longest", 60, 68))
    in_flight: deque[tuple[int, SchedulerOutput]] = deque()
    step = num_waits = 0
    while scheduler.requests or in_flight:
        while len(in_flight) < 2:
            batch = scheduler.schedule(step)
            if not len(batch.rows):
                break
            step += 1
            scheduler.kv.take_edits()
            scheduler.launched(batch, step)
            in_flight.append((step, batch))
        assert in_flight, "it waits, and nothing is under way that could end"
        table = scheduler.table
        known = table.num_tokens + table.num_in_flight
        num_waits += len(in_flight) < 2 and bool((known < table.max_len)[scheduler.running].any())
        ended, batch = in_flight.popleft()
        chosen = np.full(int(batch.num_choices.sum()), 99, np.int32)
        scheduler.update(batch, scheduler.verify(batch, chosen), step)
        scheduler.kv.complete(ended)
    return num_waits


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(AttentionSpec(block_size=8), id="attention"),
        pytest.param(SlidingWindowSpec(block_size=8, window=20), id="window"),
        pytest.param(MambaSpec(block_size=8, mode="align"), id="states"),
        pytest.param(MambaSpec(block_size=8, mode="none"), id="state"),
        pytest.param(RingSpec(block_size=8), id="ring"),
    ],
)
def test_the_longest_request_runs_alone_with_two_steps_in_flight(
    spec: CacheSpec, steps_in_flight: int
) -> None:
    """Where the pool is planned for one step, a step waits for the one before and goes on."""
    _run_alone(spec, steps_in_flight)


def test_a_pool_for_two_steps_in_flight_has_a_state_for_each() -> None:
    """So that no step waits for the state that the one before still reads."""
    states = MambaSpec(block_size=8, mode="align")
    assert _run_alone(states, steps_in_flight=1) > 0
    assert _run_alone(states, steps_in_flight=2) == 0
