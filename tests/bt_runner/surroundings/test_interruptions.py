"""Ctrl-C comes between any two instructions: no block, no row and no token is lost by it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from tests.bt_runner.harness import decode_all_densely, greedy_traffic, tiny_engine
from tests.bt_runner.surroundings.interruptions import interrupt_at, places_of

from bt_runner import decode_loop
from bt_runner.engine import Engine
from bt_runner.replay.sharing import granules, prefix
from bt_runner.replay.sharing import rows as shared_rows
from bt_runner.replay.sharing.rows import SharedRows
from bt_runner.scheduling import block_pool, request, rows, scheduler
from bt_runner.scheduling.request import FinishReason, Request, SamplingParams
from bt_runner.scheduling.rows import RequestRows
from bt_runner.scheduling.scheduler import Scheduler
from bt_width import AttentionSpec, BlockTableLayout, MambaSpec, ServingLimits

# 3.12 reports an instruction only where a frame asked before the trace was set, and those of a
# generator that is thrown away, too, where no exception can be caught
pytestmark = pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="Python 3.12 does not trace every instruction once"
)

LIMITS = ServingLimits(max_model_len=64, max_num_reqs=3, max_num_batched_tokens=16)
ATTENTION = BlockTableLayout.plan(AttentionSpec(block_size=4, token_alignment=None), LIMITS)
STATES = BlockTableLayout.plan(MambaSpec(block_size=4, mode="align"), LIMITS)


def _serve(loop: Scheduler, num_steps: int = 200) -> None:
    """Serve requests without a model, for some steps or until none is left."""
    rows_ = loop._rows
    for step in range(1, num_steps + 1):
        plan = loop.schedule(step - 1)
        for part in plan.scheduled:
            loop.launch(part, step)
        for part in plan.scheduled:
            if isinstance(rows_, SharedRows):
                rows_.offer(part.request, part.start + part.num_known)
            if part.num_choices:
                part.request.accept([9])
            if part.request.finish_reason is not None:
                loop.finish(part.request, step)
        rows_.complete(step)
        if not loop.requests:
            return


def _requests() -> list[Request]:
    params = SamplingParams(max_new_tokens=9)
    return [
        Request(request_id=name, prompt_len=length, params=params, tokens=[0] * length)
        for name, length in (("a", 9), ("b", 3), ("c", 10), ("d", 1))
    ]


def _private() -> tuple[Scheduler, list[Request]]:
    """Four requests for three rows, and blocks for two of them at a time."""
    loop = Scheduler(LIMITS, RequestRows([ATTENTION, STATES], [10, 20]))
    requests = _requests()
    for each in requests:
        loop.add(each)
    return loop, requests


def _shared() -> tuple[Scheduler, list[Request]]:
    """The same with equal beginnings, which are kept for the next request."""
    limits = ServingLimits(max_model_len=1536, max_num_reqs=3, max_num_batched_tokens=700)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=256), limits)
    rows_ = SharedRows([layout, layout], [8, 9])
    loop = Scheduler(limits, rows_)
    params = SamplingParams(max_new_tokens=9)
    requests = [
        Request(request_id=name, prompt_len=length, params=params, tokens=[0] * length)
        for name, length in (("a", 600), ("b", 1030), ("c", 1100), ("d", 520))
    ]
    hash_ids = {"a": [1], "b": [1, 2], "c": [3, 4], "d": [1]}
    for each in requests:
        loop.add(each)
        rows_.name_prefix(each, hash_ids[each.request_id])
    return loop, requests


CASES: list[Any] = [
    pytest.param(_private, [scheduler, rows, block_pool, request], id="private-blocks"),
    pytest.param(_shared, [shared_rows, prefix, granules, block_pool], id="shared-blocks"),
]


@pytest.mark.parametrize(
    "stride", [7, pytest.param(1, marks=pytest.mark.long)], ids=["some-places", "every-place"]
)
@pytest.mark.parametrize(("start", "modules"), CASES)
def test_starting_over_mends_what_was_cut_anywhere(
    start: Callable[[], tuple[Scheduler, list[Request]]], modules: list[ModuleType], stride: int
) -> None:
    """Every block is back or kept for later, and every request gets as many tokens as it wants."""
    loop, requests = start()
    places = places_of(modules, lambda: _serve(loop))
    assert sum(each.num_preemptions for each in requests) > 0
    assert len(places) > 500

    for place in places[::stride]:
        loop, requests = start()
        assert interrupt_at(place, modules, lambda: _serve(loop))  # noqa: B023  # called at once
        loop.start_over(200)
        loop._rows.complete(200)
        for group, pool in enumerate(loop._rows.pools):
            assert pool.num_used == len(set(loop._rows.shared_blocks(group))), place
            assert pool.num_free == pool.capacity - pool.num_used, place
        assert [each.row for each in requests] == [None] * len(requests)
        _serve(loop)
        assert not loop.requests, place
        assert [len(each.output) for each in requests] == [9] * len(requests), place
        assert [each.finish_reason for each in requests] == [FinishReason.LENGTH] * 4, place


def _engine() -> tuple[Engine, list[Request]]:
    traffic = greedy_traffic(1, (9, 4), max_new_tokens=3)
    engine = tiny_engine()
    pairs = zip(traffic.prompts, traffic.params, strict=True)
    return engine, [engine.add_request(prompt, params) for prompt, params in pairs]


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_an_engine_goes_on_after_an_interruption_anywhere_in_its_loop() -> None:
    """The tokens are those that it would have written anyway."""
    wanted = decode_all_densely(greedy_traffic(1, (9, 4), max_new_tokens=3))
    modules: list[ModuleType] = [decode_loop]
    engine, _ = _engine()
    places = places_of(modules, lambda: _finish(engine))

    # the clock stands around the step, and what it leaves undone is a time
    inside = [place for place in places if place[0].co_name in ("_run", "_account", "_stage_next")]
    assert len(inside) > 100
    for place in inside[::5]:
        engine, requests = _engine()
        assert interrupt_at(place, modules, lambda: _finish(engine))  # noqa: B023  # at once
        assert [pool.num_free for pool in engine.pools] == [pool.capacity for pool in engine.pools]
        _finish(engine)
        assert [each.output for each in requests] == wanted, place


@pytest.mark.parametrize("num_steps", [0, 1], ids=["waiting", "running"])
def test_an_abort_that_is_interrupted_has_ended_its_request(num_steps: int) -> None:
    """Its blocks come back, and the other request is served."""
    wanted = decode_all_densely(greedy_traffic(1, (9, 4), max_new_tokens=3))
    modules = [scheduler, rows, block_pool]

    def started() -> tuple[Engine, list[Request]]:
        engine, requests = _engine()
        for _ in range(num_steps):
            engine.step()
        return engine, requests

    engine, _ = started()
    places = places_of(modules, lambda: engine.abort("request-0"))
    for place in places[::10]:
        engine, requests = started()
        abort = engine.abort
        assert interrupt_at(place, modules, lambda: abort("request-0"))  # noqa: B023  # at once
        assert requests[0].finish_reason is FinishReason.ABORTED
        _finish(engine)
        assert requests[1].output == wanted[1]
        assert [pool.num_free for pool in engine.pools] == [pool.capacity for pool in engine.pools]
