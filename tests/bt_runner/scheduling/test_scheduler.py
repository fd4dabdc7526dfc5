"""Which requests compute how many tokens in the next step."""

from typing import Any

import pytest

from bt_runner.errors import RequestRefusedError
from bt_runner.scheduling.request import Request, SamplingParams
from bt_runner.scheduling.rows import RequestRows
from bt_runner.scheduling.scheduler import Scheduler
from bt_runner.scheduling.step_plan import StepPlan
from bt_width import AttentionSpec, BlockTableLayout, ServingLimits


def _scheduler(num_blocks: int = 50, **changes: Any) -> Scheduler:
    numbers = {"max_model_len": 64, "max_num_reqs": 3, "max_num_batched_tokens": 8} | changes
    limits = ServingLimits(**numbers)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=4, token_alignment=None), limits)
    return Scheduler(limits, RequestRows([layout], [num_blocks]))


def _request(name: str, prompt_len: int, max_new_tokens: int = 4) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return Request(
        request_id=name, prompt_len=prompt_len, params=params, tokens=list(range(prompt_len))
    )


def _batch(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(part.request.request_id, part.start, part.num_tokens) for part in plan.scheduled]


def _account(scheduler: Scheduler, plan: StepPlan) -> None:
    for part in plan.scheduled:
        if part.num_choices:
            part.request.accept([99])
        if part.request.finish_reason is None:
            scheduler.advance(part.request, part.start + part.num_known, 0)
        else:
            scheduler.finish(part.request, 0)


def _step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0)
    _account(scheduler, plan)
    return plan


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
    assert [part.is_prefilling for part in _step(scheduler).scheduled] == [False, False, True]


def test_requests_wait_for_a_row() -> None:
    """There are as many rows as requests may run."""
    scheduler = _scheduler(max_num_reqs=1)
    scheduler.add(_request("a", 1, 2))
    scheduler.add(_request("b", 1, 2))
    assert _batch(_step(scheduler)) == [("a", 0, 1)]
    assert _batch(_step(scheduler)) == [("a", 1, 1)]
    plan = _step(scheduler)
    assert _batch(plan) == [("b", 0, 1)]
    assert plan.cleared_rows == [0]


def test_the_latest_request_gives_up_its_blocks() -> None:
    """It keeps its tokens, and starts over when there is room."""
    scheduler = _scheduler(num_blocks=6)
    scheduler.add(_request("a", 7, 8))
    scheduler.add(_request("b", 6, 8))
    first = _step(scheduler)
    assert _batch(first) == [("a", 0, 7), ("b", 0, 1)]
    victim = first.scheduled[1].request
    for _ in range(20):
        plan = _step(scheduler)
        if plan.num_preempted:
            break
    assert [part.request.request_id for part in plan.scheduled] == ["a"]
    assert plan.cleared_rows == [1]
    assert victim.num_computed == 0
    assert list(scheduler.waiting) == [victim]
    while scheduler.running or scheduler.waiting:
        _step(scheduler)
    assert len(victim.output) == 8


def test_the_oldest_request_always_goes_on() -> None:
    """Whoever else is there: so something always ends, and nothing waits for ever."""
    scheduler = _scheduler(num_blocks=5)
    requests = [_request(name, 4, 12) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    for _ in range(200):
        if not (scheduler.running or scheduler.waiting):
            break
        _step(scheduler)
    assert [len(request.output) for request in requests] == [12, 12, 12]


def test_blocks_that_are_on_their_way_back_are_waited_for() -> None:
    """While a step in flight still touches freed blocks nobody is preempted for others."""
    scheduler = _scheduler(num_blocks=5)
    scheduler.add(_request("a", 4, 12))
    scheduler.add(_request("b", 4, 4))
    plan = scheduler.schedule(1)
    scheduler.advance(plan.scheduled[0].request, 4, 1)
    plan.scheduled[0].request.accept([9])
    scheduler.finish(plan.scheduled[1].request, 1)
    scheduler.add(_request("c", 9, 4))
    taken = scheduler.schedule(1)
    assert [part.request.request_id for part in taken.scheduled] == ["a"]
    assert taken.num_preempted == 0


def test_nobody_is_preempted_while_blocks_are_on_their_way_back() -> None:
    """The request that lacks one waits a step, and nobody overtakes it."""
    limits = ServingLimits(max_model_len=64, max_num_reqs=3, max_num_batched_tokens=8)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=4, token_alignment=None), limits)
    rows = RequestRows([layout], [4])
    scheduler = Scheduler(limits, rows)
    for name in "ab":
        scheduler.add(_request(name, 4, 8))
    first, second = (part.request for part in _step(scheduler).scheduled)
    scheduler.finish(second, last_step=5)
    scheduler.add(_request("c", 2))
    first.tokens += [9] * 7
    plan = scheduler.schedule(5)
    assert (plan.scheduled, plan.num_preempted) == ([], 0)
    rows.complete(5)
    assert _batch(scheduler.schedule(5)) == [("a", 4, 8)]


def test_a_request_that_waits_can_be_taken_out() -> None:
    """It holds nothing to give back."""
    scheduler = _scheduler(max_num_reqs=1)
    for name in "ab":
        scheduler.add(_request(name, 3))
    _step(scheduler)
    scheduler.finish(scheduler.waiting[0], 0)
    assert not scheduler.waiting
    assert [request.request_id for request in scheduler.running] == ["a"]


def test_drafts_are_cut_to_the_room_that_is_left() -> None:
    """A step never computes past the end of its request."""
    scheduler = _scheduler(num_speculative_tokens=3)
    request = _request("a", 4, 3)
    scheduler.add(request)
    _step(scheduler)
    request.drafts = [7, 8, 9]
    part = scheduler.schedule(0).scheduled[0]
    assert part.token_ids == [99, 7, 8]
    assert (part.num_known, part.drafts, part.num_choices) == (1, [7, 8], 3)


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


def test_a16_a_full_prompt_leaves_no_room_for_a_token() -> None:
    """Its first token would lie one column past the row."""
    scheduler = _scheduler(max_model_len=16)
    scheduler.add(_request("fits", 15, 1))
    with pytest.raises(RequestRefusedError, match="16 prompt tokens and wants 1 new"):
        scheduler.add(_request("full", 16, 1))


def test_starting_over_returns_every_block_and_keeps_the_order() -> None:
    """After a step that broke off, the requests run again as they came."""
    scheduler = _scheduler()
    for name in "ab":
        scheduler.add(_request(name, 3))
    scheduler.schedule(0)
    scheduler.start_over(0)
    assert [request.request_id for request in scheduler.waiting] == ["a", "b"]
    plan = scheduler.schedule(0)
    assert _batch(plan) == [("a", 0, 3), ("b", 0, 3)]
    assert plan.cleared_rows == [0, 1, 2]
