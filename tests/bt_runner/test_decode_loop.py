"""The next step is planned and staged while one runs: nobody's tokens or blocks show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

from bt_runner.engine import Engine
from bt_runner.execution.model_runner import ModelRunner, StepUnderWay
from bt_runner.execution.step_inputs import StepPreparation
from bt_runner.scheduling.request import FinishReason, Request, SamplingParams
from bt_runner.scheduling.step_plan import StepPlan


class Log:
    """What the device's half is asked for, in order.

    Attributes:
        calls: Names of calls; a stage that changes nothing is left out.
        plans: The plans that were staged.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Listen to every runner."""
        self.calls: list[str] = []
        self.plans: list[StepPlan] = []
        parts = ((StepPreparation, "stage"), (ModelRunner, "launch"), (ModelRunner, "wait"))
        for owner, name in parts:
            monkeypatch.setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            self.calls.append(name)
            if name == "stage":
                self.plans.append(args[1])
            return method(*args)

        return noted


def _start(engine: Engine, traffic: Traffic) -> list[Request]:
    pairs = zip(traffic.prompts, traffic.params, strict=True)
    return [engine.add_request(prompt, params) for prompt, params in pairs]


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    assert [pool.num_free for pool in engine.pools] == [pool.capacity for pool in engine.pools]


def test_the_next_step_is_staged_before_the_tokens_of_this_one_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it: rows that grow into their next block are in the plan."""
    log = Log(monkeypatch)
    traffic = greedy_traffic(1, (7, 3), max_new_tokens=6)
    assert decode(tiny_engine(), traffic) == decode_all_densely(traffic)
    assert log.calls == ["stage"] + ["launch", "stage", "wait"] * 6
    ahead = [[part.request.request_id for part in plan.scheduled] for plan in log.plans]
    assert ahead == [["request-0", "request-1"]] * 6 + [[]]
    grown = [any(any(part.new_block_ids) for part in plan.scheduled) for plan in log.plans[:6]]
    assert grown == [True, False, True, False, False, False]


def test_with_a_drafter_a_step_is_staged_when_its_drafts_are_known(
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
    assert log.calls == ["stage", "launch", "wait"] * engine.num_steps


def test_a_request_whose_last_token_is_under_way_is_not_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its length says that it ends; nothing would read what it computes."""
    log = Log(monkeypatch)
    traffic = greedy_traffic(3, (9, 4), max_new_tokens=5)
    traffic.params[1] = SamplingParams(max_new_tokens=2)
    engine = tiny_engine()
    assert decode(engine, traffic) == decode_all_densely(traffic)
    assert engine.num_steps == 5
    sizes = [len(plan.scheduled) for plan in log.plans]
    assert sizes == [2, 2, 1, 1, 1, 0]


def test_a_request_that_stops_leaves_the_step_that_was_staged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its stop token was not known when the step was planned; its neighbour goes on."""
    traffic = greedy_traffic(4, (9, 5), max_new_tokens=12)
    free = decode_all_densely(traffic)
    stop = free[0][3]
    traffic.params[0] = SamplingParams(max_new_tokens=12, stop_tokens=frozenset({stop}))
    wanted = decode_all_densely(traffic)
    engine = tiny_engine()
    requests = _start(engine, traffic)
    batches: list[int] = []
    launch = ModelRunner.launch

    def look(self: ModelRunner, step: int, scheduled: Any) -> StepUnderWay:
        batches.append(len(scheduled))
        return launch(self, step, scheduled)

    monkeypatch.setattr(ModelRunner, "launch", look)
    _finish(engine)
    assert requests[0].finish_reason is FinishReason.STOP
    assert [request.output for request in requests] == wanted
    assert batches == [2] * len(wanted[0]) + [1] * (12 - len(wanted[0]))


def test_when_all_stop_the_staged_step_is_forgotten() -> None:
    """A request that comes later finds clean rows."""
    traffic = greedy_traffic(5, (9,), max_new_tokens=12)
    stop = decode_all_densely(traffic)[0][2]
    traffic.params[0] = SamplingParams(max_new_tokens=12, stop_tokens=frozenset({stop}))
    engine = tiny_engine()
    for _ in range(3):
        (request,) = _start(engine, traffic)
        _finish(engine)
        assert [request.output] == decode_all_densely(traffic)
        assert engine.step() == []


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("after", range(1, 7))
def test_an_aborted_request_leaves_the_step_that_was_staged(mode: str, after: int) -> None:
    """Another takes its row and blocks while what was staged for it is on its way."""
    traffic = greedy_traffic(6, (20, 9, 13), max_new_tokens=9)
    engine = tiny_engine(tiny_limits(max_num_reqs=2), tiny_options(mamba_mode=mode))
    requests = _start(engine, traffic)
    for _ in range(after):
        engine.step()
    engine.abort("request-1")
    _finish(engine)
    wanted = decode_all_densely(traffic)
    assert [requests[0].output, requests[2].output] == [wanted[0], wanted[2]]


def test_a_request_that_is_added_joins_the_step_after_the_staged_one() -> None:
    """And it is staged with the others then."""
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
            num_kept += (
                request.num_preemptions > 0 and request.row is None and not request.num_computed
            )
    assert num_kept > 0
    assert list(taken.values()) == decode_all_densely(traffic)
    assert sum(request.num_preemptions for request in requests) > 0


def test_an_error_between_staging_and_the_tokens_costs_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was staged is thrown away with the step; no token is taken for pending any more."""
    traffic = greedy_traffic(9, (20, 9, 4), max_new_tokens=8)
    engine = tiny_engine()
    requests = _start(engine, traffic)
    for _ in range(4):
        engine.step()

    def fail(*_: object) -> None:
        raise ValueError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "wait", fail)
        with pytest.raises(ValueError, match="is gone"):
            engine.step()
    assert [request.num_pending for request in requests] == [0, 0, 0]
    _finish(engine)
    assert [request.output for request in requests] == decode_all_densely(traffic)


def test_the_host_clock_stops_while_the_device_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wait of a hundred seconds is nobody's work."""
    now = [0.0]
    monkeypatch.setattr("bt_runner.execution.clock.time.perf_counter", lambda: now[0])
    launch, wait = ModelRunner.launch, ModelRunner.wait

    def slow_launch(self: ModelRunner, *args: Any) -> StepUnderWay:
        now[0] += 2.0
        return launch(self, *args)

    def slow_wait(self: ModelRunner, under_way: StepUnderWay) -> list[list[int]]:
        now[0] += 100.0
        return wait(self, under_way)

    monkeypatch.setattr(ModelRunner, "launch", slow_launch)
    monkeypatch.setattr(ModelRunner, "wait", slow_wait)
    engine = tiny_engine()
    _start(engine, greedy_traffic(10, (4,), max_new_tokens=3))
    _finish(engine)
    assert engine.host_seconds == 6.0
