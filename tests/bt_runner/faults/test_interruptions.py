"""Ctrl-C comes between any two instructions: no block, no row and no token is lost by it."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
from tests.bt_runner.faults.interruptions import interrupt_at, places_of
from tests.bt_runner.harness import decode_all_densely, greedy_traffic, tiny_engine

from bt_runner import block_pool, engine, kv_cache_manager, requests, scheduler
from bt_runner.engine import Engine
from bt_runner.kv_cache_manager import KVCacheManager
from bt_runner.requests import FinishReason, Request, SamplingParams
from bt_runner.scheduler import Scheduler
from bt_width import AttentionSpec, BlockTableLayout, MambaSpec, ServingLimits

# 3.12 reports an instruction only where a frame asked before the trace was set, and those of a
# generator that is thrown away, too, where no exception can be caught
pytestmark = pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="Python 3.12 does not trace every instruction once"
)

LIMITS = ServingLimits(max_model_len=64, max_num_reqs=3, max_num_batched_tokens=16)
ATTENTION = BlockTableLayout.plan(AttentionSpec(block_size=4, token_alignment=None), LIMITS)
STATES = BlockTableLayout.plan(MambaSpec(block_size=4, mode="align"), LIMITS)


MODULES: list[ModuleType] = [scheduler, kv_cache_manager, requests, block_pool]
NUM_NEW = 9


def _serve(loop: Scheduler, num_steps: int = 200) -> None:
    """Serve requests without a model, two steps in flight, until none is left."""
    in_flight = []
    for step in range(1, num_steps + 1):
        batch = loop.schedule(step - 1)
        loop.kv.take_edits()
        loop.launched(batch, step)
        in_flight.append((step, batch))
        if len(in_flight) == 2:
            ended, batch = in_flight.pop(0)
            chosen = np.full(int(batch.num_choices.sum()), 9, np.int32)
            loop.update(batch, loop.verify(batch, chosen), step)
            loop.kv.complete(ended)
        if not loop.requests:
            return


def _started() -> tuple[Scheduler, list[Request]]:
    """Four requests for three rows, and blocks for two of them at a time."""
    loop = Scheduler(LIMITS, KVCacheManager([ATTENTION, STATES], [10, 20]))
    params = SamplingParams(max_new_tokens=NUM_NEW)
    waiting = [
        Request(name, np.zeros(length, np.int32), params)
        for name, length in (("a", 9), ("b", 3), ("c", 10), ("d", 1))
    ]
    for each in waiting:
        loop.add(each)
    return loop, waiting


def _require_whole(loop: Scheduler, waiting: list[Request]) -> None:
    """Every block is back, and every request gets as many tokens as it wants."""
    loop.kv.complete(200)
    for pool in loop.kv.pools:
        assert (pool.num_used, pool.num_free) == (0, pool.capacity)
    assert [each.row for each in waiting] == [None] * len(waiting)
    _serve(loop)
    assert not loop.requests
    assert [len(each.output) for each in waiting] == [NUM_NEW] * len(waiting)
    assert [each.finish_reason for each in waiting] == [FinishReason.LENGTH] * len(waiting)


@pytest.mark.parametrize(
    "stride", [17, pytest.param(1, marks=pytest.mark.long)], ids=["some-places", "every-place"]
)
def test_starting_over_mends_what_was_cut_anywhere(stride: int) -> None:
    """In schedule and update, in the blocks' arrays and in the tokens'."""
    loop, waiting = _started()
    places = places_of(MODULES, lambda: _serve(loop))
    assert sum(each.num_preemptions for each in waiting) > 0
    assert len(places) > 1000

    for place in places[::stride]:
        loop, waiting = _started()
        assert interrupt_at(place, MODULES, lambda: _serve(loop))  # noqa: B023  # called at once
        loop.start_over(200)
        _require_whole(loop, waiting)


@pytest.mark.parametrize(
    "stride", [7, pytest.param(1, marks=pytest.mark.long)], ids=["some-places", "every-place"]
)
def test_starting_over_can_itself_be_cut_anywhere(stride: int) -> None:
    """It begins again, from the same tokens."""

    def cut_in_a_step() -> tuple[Scheduler, list[Request]]:
        loop, waiting = _started()
        _serve(loop, 6)
        return loop, waiting

    loop, _ = cut_in_a_step()
    places = places_of(MODULES, lambda: loop.start_over(200))
    assert len(places) > 200

    for place in places[::stride]:
        loop, waiting = cut_in_a_step()
        outputs = [each.output for each in waiting]
        start_over = loop.start_over
        assert interrupt_at(place, MODULES, lambda: start_over(200))  # noqa: B023  # at once
        loop.start_over(200)
        assert [each.output for each in waiting] == outputs
        _require_whole(loop, waiting)


def _engine() -> tuple[Engine, list[Request]]:
    traffic = greedy_traffic(1, (9, 4), max_new_tokens=3)
    made = tiny_engine()
    pairs = zip(traffic.prompts, traffic.params, strict=True)
    return made, [made.add_request(prompt, params) for prompt, params in pairs]


def _finish(made: Engine) -> None:
    while made.has_work:
        made.step()


@pytest.mark.parametrize("method", ["_launch_next", "_finish_oldest", "step", "_start_over"])
def test_an_engine_goes_on_after_an_interruption_anywhere_in_its_loop(method: str) -> None:
    """The tokens are those that it would have written anyway."""
    wanted = decode_all_densely(greedy_traffic(1, (9, 4), max_new_tokens=3))
    modules: list[ModuleType] = [engine]

    def work(made: Engine) -> None:
        if method == "_start_over":
            made.step()
            made._start_over()
        _finish(made)

    made, _ = _engine()
    places = places_of(modules, lambda: work(made))
    inside = [place for place in places if place[0].co_name == method]
    assert len(inside) > 20
    for place in inside[::5]:
        made, waiting = _engine()
        assert interrupt_at(place, modules, lambda: work(made))  # noqa: B023  # at once
        _finish(made)
        assert [pool.num_free for pool in made.pools] == [pool.capacity for pool in made.pools]
        assert [each.output for each in waiting] == wanted, place


@pytest.mark.parametrize("num_steps", [0, 1], ids=["waiting", "running"])
def test_an_abort_that_is_interrupted_has_ended_its_request(num_steps: int) -> None:
    """Its blocks come back, and the other request is served."""
    wanted = decode_all_densely(greedy_traffic(1, (9, 4), max_new_tokens=3))

    def started() -> tuple[Engine, list[Request]]:
        made, waiting = _engine()
        for _ in range(num_steps):
            made.step()
        return made, waiting

    made, _ = started()
    places = places_of(MODULES, lambda: made.abort("request-0"))
    for place in places[::10]:
        made, waiting = started()
        abort = made.abort
        assert interrupt_at(place, MODULES, lambda: abort("request-0"))  # noqa: B023  # at once
        if waiting[0].finish_reason is None:
            made.abort("request-0")  # it was cut before anything had changed
        _finish(made)
        assert waiting[1].output == wanted[1]
        assert [pool.num_free for pool in made.pools] == [pool.capacity for pool in made.pools]
