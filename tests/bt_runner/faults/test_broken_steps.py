"""Whatever raises within a step, the engine goes on: same tokens, and every block comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.bt_runner.harness import (
    SpoiledDrafter,
    Traffic,
    decode_all_densely,
    greedy_traffic,
    tiny_engine,
    tiny_limits,
    tiny_options,
)

from bt_builders import DSAIndexerMetadataBuilder, MambaMetadataBuilder, MLAMetadataBuilder
from bt_runner.drafters import Drafter
from bt_runner.engine import Engine
from bt_runner.input_batch import InputBuffers
from bt_runner.kv_cache_manager import KVCacheManager
from bt_runner.models.layers.mamba2 import Mamba2Mixer
from bt_runner.models.layers.mla import DenseAttention
from bt_runner.models.paged_model import PagedModel
from bt_runner.recorder import Recorder
from bt_runner.requests import Request, RunningRequests
from bt_runner.scheduler import Scheduler
from bt_tables import StagedBlockTables

NUM_DRAFTS = 2
LENGTHS = (20, 9, 4)


class InterruptionError(RuntimeError):
    """What is raised in the middle of a step."""


@contextmanager
def raising(owner: Any, name: str, call: int, *, after: bool = False) -> Iterator[list[str]]:
    """Let ``owner.name`` raise at its ``call``-th call, before or after it did its work."""
    original = getattr(owner, name)
    calls: list[str] = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) != call:
            return original(*args, **kwargs)
        if after:
            original(*args, **kwargs)
        raise InterruptionError(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        yield calls


def _start(mode: str, drafter: Drafter | None, traffic: Traffic) -> tuple[Engine, list[Request]]:
    num_drafts = NUM_DRAFTS if drafter else 0
    engine = tiny_engine(
        tiny_limits(num_speculative_tokens=num_drafts),
        tiny_options(mamba_mode=mode, num_speculative_blocks=num_drafts),
        drafter=drafter,
    )
    pairs = zip(traffic.prompts, traffic.params, strict=True)
    return engine, [engine.add_request(prompt, params) for prompt, params in pairs]


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


PLACES: list[Any] = [
    pytest.param(StagedBlockTables, "stage", id="staging"),
    pytest.param(InputBuffers, "pack", id="batch"),
    pytest.param(StagedBlockTables, "step", id="tables"),
    pytest.param(MLAMetadataBuilder, "build", id="mla-builder"),
    pytest.param(DSAIndexerMetadataBuilder, "build", id="indexer-builder"),
    pytest.param(MambaMetadataBuilder, "build", id="mamba-builder"),
    pytest.param(Mamba2Mixer, "__call__", id="first-layer"),
    pytest.param(DenseAttention, "__call__", id="a-layer-in-between"),
    pytest.param(PagedModel, "forward", id="model"),
    pytest.param(PagedModel, "logits", id="logits"),
    pytest.param(Scheduler, "verify", id="choice"),
    pytest.param(MambaMetadataBuilder, "commit_states", id="states"),
    pytest.param(Scheduler, "update", id="update"),
    pytest.param(RunningRequests, "append", id="tokens"),
    pytest.param(KVCacheManager, "allocate", id="allocation"),
    pytest.param(KVCacheManager, "advance", id="trimming"),
    pytest.param(KVCacheManager, "complete", id="completion"),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_an_error_anywhere_in_a_step_leaves_the_engine_usable(
    owner: Any, name: str, mode: str, after: bool
) -> None:
    """States and caches may be written or not: requests start over, and get the same tokens."""
    traffic = greedy_traffic(3, LENGTHS, max_new_tokens=8)
    wanted = decode_all_densely(traffic)
    drafter = SpoiledDrafter(traffic, wanted, 0.6)
    engine, requests = _start(mode, drafter, traffic)

    with raising(owner, name, call=3, after=after) as calls, pytest.raises(InterruptionError):
        _finish(engine)
    # starting over may come there, too
    assert len(calls) >= 3
    assert [pool.num_used for pool in engine.pools] == [0, 0, 0]
    _finish(engine)

    assert [request.output for request in requests] == wanted
    assert [pool.num_free for pool in engine.pools] == [pool.capacity for pool in engine.pools]


def test_a_row_that_cannot_be_cleared_is_cleared_later() -> None:
    """A plan says once that a request has left; where it is lost, all rows are cleared."""
    traffic = greedy_traffic(3, (*LENGTHS, 6, 2), max_new_tokens=4)
    engine, requests = _start("none", None, traffic)

    with raising(StagedBlockTables, "clear_row", call=1), pytest.raises(InterruptionError):
        _finish(engine)
    _finish(engine)

    assert [request.output for request in requests] == decode_all_densely(traffic)


class Interrupted(Recorder):
    """A callback that raises in its third step."""

    def record(self, step: int, *rest: Any) -> None:
        if step == 3:
            raise InterruptionError("callback")
        super().record(step, *rest)


def test_a_callback_that_raises_leaves_the_engine_usable() -> None:
    traffic = greedy_traffic(4, LENGTHS, max_new_tokens=8)
    engine, requests = _start("none", None, traffic)
    engine.observe(Interrupted())

    with pytest.raises(InterruptionError):
        _finish(engine)
    assert engine.num_steps == 4
    _finish(engine)

    assert [request.output for request in requests] == decode_all_densely(traffic)


class RaisingDrafter:
    """Raises at one of its calls, and knows the texts at the others."""

    def __init__(self, drafter: Drafter, call: int) -> None:
        self._drafter = drafter
        self._call = call
        self.num_calls = 0

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        self.num_calls += 1
        if self.num_calls == self._call:
            raise InterruptionError("drafter")
        return self._drafter.propose(tokens, max_drafts)


@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("mode", ["none", "align"])
def test_a_drafter_that_raises_costs_no_request_a_token(mode: str, call: int) -> None:
    """Whoever reads what steps return misses none, and gets none twice."""
    traffic = greedy_traffic(5, LENGTHS, max_new_tokens=8)
    wanted = decode_all_densely(traffic)
    drafter = RaisingDrafter(SpoiledDrafter(traffic, wanted, 0.6), call)
    engine, requests = _start(mode, drafter, traffic)
    streamed: dict[str, list[int]] = {request.request_id: [] for request in requests}

    num_errors = 0
    while engine.has_work:
        try:
            for output in engine.step():
                streamed[output.request_id] += output.new_tokens
        except InterruptionError:
            num_errors += 1

    assert num_errors == 1
    assert list(streamed.values()) == [request.output for request in requests] == wanted


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_in_a_layer_leaves_the_engine_usable(error: type[BaseException]) -> None:
    """The signal arrives wherever it does; here after a state was written."""
    traffic = greedy_traffic(6, LENGTHS, max_new_tokens=8)
    engine, requests = _start("none", None, traffic)
    for _ in range(3):
        engine.step()

    def interrupt(*_: Any) -> torch.Tensor:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DenseAttention, "__call__", interrupt)
        with pytest.raises(error):
            engine.step()
    _finish(engine)

    assert [request.output for request in requests] == decode_all_densely(traffic)


def test_a_reader_that_raises_can_take_back_what_it_asked_for() -> None:
    """The stream ends where its reader does; what is left is aborted, and the next one served."""
    traffic = greedy_traffic(7, LENGTHS, max_new_tokens=8)
    engine, _ = _start("none", None, Traffic([], []))

    def read() -> None:
        for output in engine.generate(traffic.prompts, traffic.params[0]):
            raise InterruptionError(output.request_id)

    with pytest.raises(InterruptionError):
        read()
    for number in range(len(LENGTHS)):
        engine.abort(f"request-{number}")
    _finish(engine)

    assert [pool.num_free for pool in engine.pools] == [pool.capacity for pool in engine.pools]
    request = engine.add_request(traffic.prompts[1], traffic.params[1])
    _finish(engine)
    assert request.output == decode_all_densely(traffic)[1]


def test_an_engine_that_fails_at_every_step_loses_no_block() -> None:
    traffic = greedy_traffic(8, LENGTHS, max_new_tokens=4)
    engine, requests = _start("align", None, traffic)

    def fail(*_: Any) -> Callable[..., None]:
        raise InterruptionError("always")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedModel, "forward", fail)
        for _ in range(25):
            with pytest.raises(InterruptionError):
                engine.step()
            assert [pool.num_used for pool in engine.pools] == [0, 0, 0]
    _finish(engine)

    assert [request.output for request in requests] == decode_all_densely(traffic)
