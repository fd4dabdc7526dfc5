"""A step is launched while the one before is in flight; no token and no block shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.bt_runner.harness import (
    SpoiledDrafter,
    Traffic,
    decode,
    decode_all_densely,
    greedy_traffic,
    tiny_engine,
    tiny_limits,
    tiny_options,
)

from bt_runner.block_pool import BlockIds, BlockPool
from bt_runner.engine import Engine
from bt_runner.model_runner import InFlightStep, ModelRunner
from bt_runner.requests import FinishReason, Request, SamplingParams
from bt_runner.scheduler import SchedulerOutput


class Log:
    """What the device's half is asked for, in order.

    Attributes:
        calls: Names of calls, with the step.
        batches: The requests of each launched step.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Listen to every runner."""
        self.calls: list[str] = []
        self.batches: list[list[str]] = []
        launch, wait = ModelRunner.launch, InFlightStep.wait

        def noted_launch(
            runner: ModelRunner, step: int, batch: SchedulerOutput, *rest: Any, **named: Any
        ) -> InFlightStep:
            self.calls.append(f"launch {step}")
            self.batches.append([request.request_id for request in batch.requests])
            return launch(runner, step, batch, *rest, **named)

        def noted_wait(in_flight: InFlightStep) -> Any:
            self.calls.append(f"wait {in_flight.step}")
            return wait(in_flight)

        monkeypatch.setattr(ModelRunner, "launch", noted_launch)
        monkeypatch.setattr(InFlightStep, "wait", noted_wait)


def _start(engine: Engine, traffic: Traffic) -> list[Request]:
    pairs = zip(traffic.prompts, traffic.params, strict=True)
    return [engine.add_request(prompt, params) for prompt, params in pairs]


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    assert [pool.num_free for pool in engine.pools] == [pool.capacity for pool in engine.pools]


def test_the_next_step_is_launched_before_the_tokens_of_this_one_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that grow into their next block meanwhile are in it."""
    log = Log(monkeypatch)
    traffic = greedy_traffic(1, (7, 3), max_new_tokens=6)
    assert decode(tiny_engine(), traffic) == decode_all_densely(traffic)
    launches = ["launch 1"]
    for step in range(1, 6):
        launches += [f"launch {step + 1}", f"wait {step}"]
    assert log.calls == [*launches, "wait 6"]
    assert log.batches == [["request-0", "request-1"]] * 6


def test_the_plain_loop_reads_a_step_before_it_launches_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One step in flight."""
    log = Log(monkeypatch)
    traffic = greedy_traffic(1, (7, 3), max_new_tokens=3)
    engine = tiny_engine(max_steps_in_flight=1)
    assert decode(engine, traffic) == decode_all_densely(traffic)
    assert log.calls == [f"{what} {step}" for step in (1, 2, 3) for what in ("launch", "wait")]


def test_with_a_drafter_a_step_is_launched_when_its_drafts_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How far a request gets, and what is drafted for it, depends on the tokens."""
    traffic = greedy_traffic(2, (7, 3), max_new_tokens=6)
    wanted = decode_all_densely(traffic)
    engine = tiny_engine(
        tiny_limits(num_speculative_tokens=2),
        tiny_options(num_speculative_blocks=2),
        drafter=SpoiledDrafter(traffic, wanted, 0.6),
    )
    log = Log(monkeypatch)
    assert decode(engine, traffic) == wanted
    assert engine.max_steps_in_flight == 1
    steps = range(1, engine.num_steps + 1)
    assert log.calls == [f"{what} {step}" for step in steps for what in ("launch", "wait")]


def test_a_request_whose_last_token_is_in_flight_is_not_scheduled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its length says that it ends; nothing would read what it computes."""
    log = Log(monkeypatch)
    traffic = greedy_traffic(3, (9, 4), max_new_tokens=5)
    traffic.params[1] = SamplingParams(max_new_tokens=2)
    engine = tiny_engine()
    assert decode(engine, traffic) == decode_all_densely(traffic)
    assert engine.num_steps == 5
    assert [len(batch) for batch in log.batches] == [2, 2, 1, 1, 1]


def test_a_stop_token_is_noticed_a_step_late_and_the_token_after_it_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its neighbour goes on, and nothing of the dropped token is to be seen."""
    traffic = greedy_traffic(4, (9, 5), max_new_tokens=12)
    free = decode_all_densely(traffic)
    stop = free[0][3]
    traffic.params[0] = SamplingParams(max_new_tokens=12, stop_tokens=frozenset({stop}))
    wanted = decode_all_densely(traffic)
    engine = tiny_engine()
    requests = _start(engine, traffic)
    log = Log(monkeypatch)
    streamed: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            streamed[output.request_id] += output.new_tokens
    assert requests[0].finish_reason is FinishReason.STOP
    assert [request.output for request in requests] == list(streamed.values()) == wanted
    num_late = len(wanted[0]) + 1
    assert [len(batch) for batch in log.batches] == [2] * num_late + [1] * (12 - num_late)


@pytest.mark.parametrize("mode", ["none", "align"])
def test_no_block_is_given_again_before_the_steps_that_may_touch_it_have_ended(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A step ends when its tokens are read, not when it is launched."""
    traffic = greedy_traffic(8, (16, 15, 11, 20, 7), max_new_tokens=14)
    stop = decode_all_densely(traffic)[1][5]
    traffic.params[1] = SamplingParams(max_new_tokens=14, stop_tokens=frozenset({stop}))
    ended, early, num_reused = 0, 0, 0
    last_touched: dict[tuple[int, int], int] = {}
    wait, release, allocate = InFlightStep.wait, BlockPool.release, BlockPool.allocate

    def noted_wait(in_flight: InFlightStep) -> Any:
        nonlocal ended
        ended = in_flight.step
        return wait(in_flight)

    def noted_release(pool: BlockPool, block_ids: BlockIds, *, last_step: int) -> None:
        assert last_step == engine.num_steps or not engine._in_flight
        release(pool, block_ids, last_step=last_step)
        for block in np.asarray(block_ids).tolist():
            last_touched[id(pool), block] = engine.num_steps

    def noted_allocate(pool: BlockPool, count: int) -> Any:
        nonlocal early, num_reused
        ids = allocate(pool, count)
        for block in ids.tolist():
            early += last_touched.get((id(pool), block), 0) > ended
            num_reused += (id(pool), block) in last_touched
        return ids

    engine = tiny_engine(
        tiny_limits(max_num_batched_tokens=24),
        tiny_options(mamba_mode=mode),
        num_blocks=[1 + 14, 1 + 7, 1 + 6],
    )
    monkeypatch.setattr(InFlightStep, "wait", noted_wait)
    monkeypatch.setattr(BlockPool, "release", noted_release)
    monkeypatch.setattr(BlockPool, "allocate", noted_allocate)
    requests = _start(engine, traffic)
    _finish(engine)
    assert [request.output for request in requests] == decode_all_densely(traffic)
    assert num_reused > 20
    assert early == 0


def test_when_all_stop_the_step_in_flight_is_forgotten() -> None:
    """A request that comes later finds clean rows."""
    traffic = greedy_traffic(5, (9,), max_new_tokens=12)
    stop = decode_all_densely(traffic)[0][2]
    traffic.params[0] = SamplingParams(max_new_tokens=12, stop_tokens=frozenset({stop}))
    engine = tiny_engine()
    for _ in range(3):
        (request,) = _start(engine, traffic)
        _finish(engine)
        assert [request.output] == decode_all_densely(traffic)
        assert list(engine.step()) == []


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("after", range(1, 7))
def test_an_aborted_request_gets_nothing_of_the_step_in_flight(mode: str, after: int) -> None:
    """Another takes its row and blocks while its token is on its way."""
    traffic = greedy_traffic(6, (20, 9, 13), max_new_tokens=9)
    engine = tiny_engine(tiny_limits(max_num_reqs=2), tiny_options(mamba_mode=mode))
    requests = _start(engine, traffic)
    for _ in range(after):
        engine.step()
    engine.abort("request-1")
    _finish(engine)
    wanted = decode_all_densely(traffic)
    assert [requests[0].output, requests[2].output] == [wanted[0], wanted[2]]


def test_a_request_that_is_added_joins_the_step_after_those_in_flight() -> None:
    """And it is scheduled with the others then."""
    traffic = greedy_traffic(7, (9, 5), max_new_tokens=8)
    engine = tiny_engine()
    engine.add_request(traffic.prompts[0], traffic.params[0])
    engine.step()
    late = engine.add_request(traffic.prompts[1], traffic.params[1])
    engine.step()
    assert late.output == []
    engine.step()
    assert len(late.output) == 1
    _finish(engine)
    assert late.output == decode_all_densely(traffic)[1]


@pytest.mark.parametrize("mode", ["none", "align"])
def test_who_is_preempted_while_its_token_is_under_way_keeps_the_token(mode: str) -> None:
    """No choice is made twice, and blocks come back only when the step has ended."""
    traffic = greedy_traffic(8, (16, 15, 11), max_new_tokens=14)
    engine = tiny_engine(
        tiny_limits(max_num_batched_tokens=96),
        tiny_options(mamba_mode=mode),
        num_blocks=[1 + 14, 1 + 7, 1 + 6],
    )
    requests = _start(engine, traffic)
    taken: dict[str, list[int]] = {request.request_id: [] for request in requests}
    num_kept = 0
    while engine.has_work:
        for output in engine.step():
            taken[output.request_id] += output.new_tokens
            request = requests[int(output.request_id[-1])]
            num_kept += request.num_preemptions > 0 and request.row is None
    assert num_kept > 0
    assert list(taken.values()) == decode_all_densely(traffic)
    assert sum(request.num_preemptions for request in requests) > 0


def test_an_error_between_launch_and_the_tokens_costs_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is in flight is thrown away; no token is taken for one on its way any more."""
    traffic = greedy_traffic(9, (20, 9, 4), max_new_tokens=8)
    engine = tiny_engine()
    requests = _start(engine, traffic)
    for _ in range(4):
        engine.step()

    def fail(*_: object) -> None:
        raise ValueError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(InFlightStep, "wait", fail)
        with pytest.raises(ValueError, match="is gone"):
            engine.step()
    assert [request.row for request in requests] == [None, None, None]
    _finish(engine)
    assert [request.output for request in requests] == decode_all_densely(traffic)


def test_the_host_clock_stops_while_the_device_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wait of a hundred seconds counts as no work."""
    now = [0.0]
    monkeypatch.setattr("bt_runner.engine.time.perf_counter", lambda: now[0])
    launch, wait = ModelRunner.launch, InFlightStep.wait

    def slow_launch(self: ModelRunner, *args: Any, **named: Any) -> InFlightStep:
        now[0] += 2.0
        return launch(self, *args, **named)

    def slow_wait(in_flight: InFlightStep) -> Any:
        now[0] += 100.0
        return wait(in_flight)

    monkeypatch.setattr(ModelRunner, "launch", slow_launch)
    monkeypatch.setattr(InFlightStep, "wait", slow_wait)
    engine = tiny_engine()
    _start(engine, greedy_traffic(10, (4,), max_new_tokens=3))
    _finish(engine)
    assert engine.host_seconds == 6.0


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_a_token_in_flight_may_begin_a_chunk_of_tokens_beside_a_prompt(num_steps: int) -> None:
    """Its place is not there before the host knows it, and another's prompt is read meanwhile."""
    limits = tiny_limits(max_model_len=300, max_num_batched_tokens=300)
    traffic = greedy_traffic(9, (253, 5), max_new_tokens=8)
    engine = tiny_engine(limits)
    first = engine.add_request(traffic.prompts[0], traffic.params[0])
    # in one of these steps position 256, the first past a chunk of 256, is beside the prompt
    for _ in range(num_steps):
        engine.step()
    second = engine.add_request(traffic.prompts[1], traffic.params[1])
    _finish(engine)
    assert [first.output, second.output] == decode_all_densely(traffic)
