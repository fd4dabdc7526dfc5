"""The loop as a whole: every token equals the dense reference's, whatever happens around it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.bt_runner.harness import (
    Traffic,
    decode,
    decode_all_densely,
    decode_densely,
    greedy_traffic,
    random_prompts,
    tiny_engine,
    tiny_limits,
    tiny_options,
    verdicts,
)

from bt_runner.errors import BadInputError, RequestRefusedError
from bt_runner.kv_cache_manager import KVCacheManager
from bt_runner.model_runner import InFlightStep, ModelRunner
from bt_runner.requests import FinishReason, SamplingParams

LENGTHS = (1, 17, 40, 5, 8, 33)


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 96], ids=["by-one", "odd", "a-block", "whole"])
def test_batched_and_chunked_equals_one_by_one(mode: str, chunk: int) -> None:
    """Requests of many lengths in one batch, prompts in pieces, states crossing blocks."""
    traffic = greedy_traffic(1, LENGTHS if chunk > 1 else LENGTHS[:3])
    engine = tiny_engine(
        tiny_limits(max_num_batched_tokens=chunk, max_num_reqs=min(chunk, 4)),
        tiny_options(mamba_mode=mode),
    )
    assert decode(engine, traffic) == decode_all_densely(traffic)


def test_requests_join_while_others_run() -> None:
    """Late arrivals change no request's tokens, their own included."""
    traffic = greedy_traffic(2, LENGTHS)
    late = Traffic(traffic.prompts, traffic.params, arrivals=[0, 3, 5, 9, 9, 14])
    assert decode(tiny_engine(), late) == decode_all_densely(traffic)


@pytest.mark.parametrize("mode", ["none", "align"])
def test_a_quarter_of_the_blocks_gives_the_same_tokens(mode: str) -> None:
    """Requests are preempted and start over; recomputed output is prompt like any other."""
    traffic = greedy_traffic(3, (30, 28, 31, 29), max_new_tokens=20)
    ample = tiny_engine(options=tiny_options(mamba_mode=mode))
    # a quarter of what all four need; states are few, and two requests' are left
    quarter = [1 + layout.num_blocks(51) for layout in ample.layouts[:2]]
    quarter.append(1 + 2 * ample.layouts[2].max_resident_blocks(16))
    scarce = tiny_engine(options=tiny_options(mamba_mode=mode), num_blocks=quarter)
    pairs = zip(traffic.prompts, traffic.params, strict=True)
    requests = [scarce.add_request(prompt, params) for prompt, params in pairs]
    while scarce.has_work:
        scarce.step()

    assert sum(request.num_preemptions for request in requests) > 0
    outputs = [request.output for request in requests]
    assert outputs == decode(ample, traffic) == decode_all_densely(traffic)


def test_a_resumed_request_holds_only_its_new_blocks() -> None:
    """Its row is replaced, not extended: the tail of the old one belongs to others.

    Reported as https://github.com/vllm-project/vllm/pull/46595
    and https://github.com/LMCache/LMCache/pull/1361
    and https://github.com/RBLN-SW/vllm-rbln/pull/676
    """
    traffic = greedy_traffic(4, (30, 28), max_new_tokens=20)
    engine = tiny_engine(num_blocks=[1 + 18, 1 + 9, 1 + 2])
    for verdict in verdicts(engine, traffic):
        assert verdict.difference is None


def test_the_longest_request_of_a_pool_ends_and_one_longer_is_refused() -> None:
    """8 blocks of 128, one of them the null block: 896 tokens, not 1,024.

    Reported as https://github.com/vllm-project/vllm/pull/48724
    and https://github.com/vllm-project/vllm-metal/pull/513
    """
    options = tiny_options(
        attention_block_size=128, sparse_block_size=128, kernel_block_sizes=(64,)
    )
    limits = tiny_limits(max_model_len=1024, max_num_batched_tokens=512)
    engine = tiny_engine(limits, options, num_blocks=8)
    (prompt,) = random_prompts(5, [892])
    with pytest.raises(RequestRefusedError, match="needs 8 blocks of group 'dense' for 897 tokens"):
        engine.add_request(prompt, SamplingParams(max_new_tokens=5))
    assert not engine.has_work
    traffic = Traffic([prompt], [SamplingParams(max_new_tokens=4)])
    assert decode(engine, traffic) == decode_all_densely(traffic)


def test_stop_tokens_end_a_request_and_are_kept() -> None:
    """Its blocks go back at once."""
    (prompt,) = random_prompts(6, [9])
    free = decode_densely(prompt, SamplingParams(max_new_tokens=12))
    stop = free[4]
    params = SamplingParams(max_new_tokens=12, stop_tokens=frozenset({stop}))
    engine = tiny_engine()
    request = engine.add_request(prompt, params)
    while engine.has_work:
        engine.step()
    assert request.output == free[: free.index(stop) + 1]
    assert request.finish_reason is FinishReason.STOP
    assert [pool.num_used for pool in engine.pools] == [0, 0, 0]


def test_drawn_tokens_do_not_depend_on_the_batch_or_on_preemption() -> None:
    """A seed stands for one text."""
    prompts = random_prompts(7, (20, 18, 22))
    params = [SamplingParams(max_new_tokens=16, temperature=0.9, seed=seed) for seed in (1, 2, 3)]
    alone = [
        decode(tiny_engine(), Traffic([prompt], [each]))[0]
        for prompt, each in zip(prompts, params, strict=True)
    ]
    scarce = tiny_engine(num_blocks=[1 + 12, 1 + 6, 1 + 2])
    assert decode(scarce, Traffic(prompts, params)) == alone
    reseeded = SamplingParams(max_new_tokens=16, temperature=0.9, seed=4)
    assert decode(tiny_engine(), Traffic(prompts[:1], [reseeded]))[0] != alone[0]


@pytest.mark.parametrize(
    ("max_steps_in_flight", "launched"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 3, 4, 5, 6])]
)
def test_generate_streams_tokens_as_they_come(
    max_steps_in_flight: int, launched: list[int]
) -> None:
    """Every step's tokens are there before the next but one is launched."""
    traffic = greedy_traffic(8, (3, 12), max_new_tokens=6)
    engine = tiny_engine(max_steps_in_flight=max_steps_in_flight)
    texts: dict[str, list[int]] = {}
    steps = []
    for output in engine.generate(traffic.prompts, traffic.params[0]):
        texts.setdefault(output.request_id, []).extend(output.new_tokens)
        steps.append(engine.num_steps)
    assert list(texts.values()) == decode_all_densely(traffic)
    assert sorted(set(steps)) == launched


def test_an_aborted_request_gives_its_blocks_back() -> None:
    """The others go on as if it had not been there."""
    traffic = greedy_traffic(9, (20, 9), max_new_tokens=8)
    engine = tiny_engine()
    doomed = engine.add_request(traffic.prompts[0], traffic.params[0])
    kept = engine.add_request(traffic.prompts[1], traffic.params[1])
    engine.step()
    engine.abort(doomed.request_id)
    while engine.has_work:
        engine.step()
    assert doomed.finish_reason is FinishReason.ABORTED
    assert kept.output == decode_densely(traffic.prompts[1], traffic.params[1])
    assert [pool.num_used for pool in engine.pools] == [0, 0, 0]


def test_a_name_in_use_is_refused() -> None:
    """Two requests of one name could not be told apart."""
    engine = tiny_engine()
    engine.add_request([1], request_id="a")
    with pytest.raises(BadInputError, match="there is a request 'a' already"):
        engine.add_request([2], request_id="a")


def test_an_idle_engine_does_nothing() -> None:
    """No request, no step, no launch."""
    engine = tiny_engine()
    assert list(engine.step()) == []
    assert engine.num_steps == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(KVCacheManager, "take_edits"), (ModelRunner, "launch"), (InFlightStep, "wait")],
    ids=["before", "within", "after"],
)
def test_a_step_that_fails_leaves_the_engine_usable(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], owner: type, name: str
) -> None:
    """Its requests start over, and their tokens are those of an undisturbed run."""
    traffic = greedy_traffic(10, (20, 9, 4), max_new_tokens=8)
    engine = tiny_engine()
    pairs = zip(traffic.prompts, traffic.params, strict=True)
    requests = [engine.add_request(prompt, params) for prompt, params in pairs]
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _raising(error))
        with pytest.raises(error):
            engine.step()
    assert [pool.num_used for pool in engine.pools] == [0, 0, 0]
    while engine.has_work:
        engine.step()
    assert [request.output for request in requests] == decode_all_densely(traffic)


def _raising(error: type[BaseException]) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
