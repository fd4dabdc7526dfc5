"""Every public call of bt-runner refuses what it cannot serve, and serves the next request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.bt_runner.harness import (
    recompute,
    tiny_engine,
    tiny_hybrid,
    tiny_limits,
    tiny_options,
    tiny_weights,
)
from tests.support.bad_values import Call, bad_values, refuses_or_answers, spoiled_arguments

from bt_runner import (
    BadInputError,
    CacheOptions,
    Engine,
    ModelConfig,
    NGramDrafter,
    RunnerError,
    SamplingParams,
    random_weights,
)
from bt_runner.cuda_graphs import GraphOptions
from bt_runner.models.config import TensorNames
from bt_runner.models.sharding import SingleRank
from bt_runner.recorder import Recorder
from bt_width import BlockTableError, ServingLimits

ERRORS = (RunnerError, BlockTableError)
PROMPT = [1, 2, 3, 4, 5]
PARAMS = SamplingParams(max_new_tokens=2)


def outputs_of(engine: Engine) -> list[list[int]]:
    """Run what the engine has, and return the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_tokens)
    assert all(pool.num_free == pool.capacity for pool in engine.pools)
    return list(tokens.values())


def busy_engine() -> Engine:
    """An engine that has begun with one request."""
    engine = tiny_engine()
    engine.add_request(PROMPT, SamplingParams(max_new_tokens=4), request_id="first")
    engine.step()
    return engine


WANTED = outputs_of(busy_engine())


def method_call(name: str, good: dict[str, Callable[[], object]]) -> Call:
    """A method of an engine that runs a request; a refusal leaves that request as it was."""
    engine = busy_engine()

    def call(**arguments: Any) -> object:
        result = getattr(engine, name)(**arguments)
        # a generator has done nothing yet
        return list(result) if name == "generate" else result

    def unharmed() -> None:
        assert list(engine._scheduler.requests) == ["first"]
        assert outputs_of(engine) == WANTED

    return Call(f"Engine.{name}", call, good, unharmed, ERRORS)


REQUEST: dict[str, Callable[[], object]] = {
    "prompt": lambda: list(PROMPT),
    "params": lambda: PARAMS,
    "request_id": lambda: "second",
}


def engine_call() -> Call:
    def make(**arguments: Any) -> object:
        engine = Engine(**arguments)
        engine.add_request(PROMPT, PARAMS)
        return outputs_of(engine)

    return Call(
        "Engine",
        make,
        {
            "config": tiny_hybrid,
            "weights": tiny_weights,
            "limits": tiny_limits,
            "options": tiny_options,
            "num_blocks": lambda: [20, 20, 20],
            "drafter": lambda: None,
            "ranks": SingleRank,
            "graphs": lambda: GraphOptions(batch_sizes=(1,), capture=recompute),
            "sanitizes": lambda: True,
        },
        errors=ERRORS,
    )


def options_call() -> Call:
    def make(**changes: Any) -> object:
        options = CacheOptions(**changes)
        return Engine(tiny_hybrid(), tiny_weights(), tiny_limits(), options=options)

    good: dict[str, Callable[[], object]] = {
        "attention_block_size": lambda: 4,
        "sparse_block_size": lambda: 8,
        "kernel_block_sizes": lambda: (4,),
        "mamba_block_size": lambda: 8,
        "mamba_mode": lambda: "align",
        "num_speculative_blocks": lambda: 0,
    }
    return Call("CacheOptions", make, good, errors=ERRORS)


def drafter_call() -> Call:
    """An engine whose drafter says anything: it refuses, or serves as without one."""

    class Drafter:
        def __init__(self, proposal: Sequence[int]) -> None:
            self.proposal = proposal

        def propose(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
            return self.proposal

    limits = ServingLimits(
        max_model_len=32, max_num_reqs=1, max_num_batched_tokens=8, num_speculative_tokens=2
    )

    def make(proposal: Any) -> None:
        engine = tiny_engine(
            limits, tiny_options(num_speculative_blocks=2), drafter=Drafter(proposal)
        )
        engine.add_request(PROMPT, SamplingParams(max_new_tokens=4))
        assert outputs_of(engine) == ONE_REQUEST

    return Call("Drafter.propose", make, {"proposal": lambda: [1, 2]}, errors=ERRORS)


def _alone() -> list[list[int]]:
    engine = tiny_engine()
    engine.add_request(PROMPT, SamplingParams(max_new_tokens=4))
    return outputs_of(engine)


ONE_REQUEST = _alone()

CALLS: list[tuple[str, Callable[[], Call]]] = [
    ("Engine", engine_call),
    ("CacheOptions", options_call),
    ("a drafter's proposal", drafter_call),
    ("new_request", lambda: method_call("new_request", REQUEST)),
    ("add_request", lambda: method_call("add_request", REQUEST)),
    (
        "generate",
        lambda: method_call(
            "generate", {"prompts": lambda: [list(PROMPT), [7]], "params": lambda: PARAMS}
        ),
    ),
    ("abort", lambda: method_call("abort", {"request_id": lambda: "first"})),
    ("observe", lambda: method_call("observe", {"recorder": Recorder})),
    (
        "SamplingParams",
        lambda: Call(
            "SamplingParams",
            lambda **fields: tiny_engine().add_request(PROMPT, SamplingParams(**fields)),
            {
                "max_new_tokens": lambda: 2,
                "temperature": lambda: 0.5,
                "seed": lambda: 3,
                "stop_tokens": lambda: frozenset({4}),
            },
            errors=ERRORS,
        ),
    ),
    (
        "NGramDrafter",
        lambda: Call(
            "NGramDrafter",
            lambda **fields: NGramDrafter(**fields).propose([1, 2, 1, 2], 2),
            {"longest": lambda: 2, "reach": lambda: 100},
            errors=ERRORS,
        ),
    ),
    (
        "ModelConfig",
        lambda: Call(
            "ModelConfig",
            ModelConfig,
            {
                "vocab_size": lambda: 5,
                "hidden_size": lambda: 16,
                "layers": lambda: tiny_hybrid().layers,
                "norm_eps": lambda: 1e-6,
                "max_positions": lambda: 64,
                "stop_token_ids": lambda: (1,),
                "names": TensorNames,
            },
            errors=ERRORS,
        ),
    ),
    (
        "random_weights",
        lambda: Call(
            "random_weights",
            random_weights,
            {
                "config": tiny_hybrid,
                "seed": lambda: 0,
                "dtype": lambda: torch.float64,
                "device": lambda: "cpu",
            },
            errors=ERRORS,
        ),
    ),
]


def assert_bad_input_is_refused(data: st.DataObject) -> None:
    _, make = data.draw(st.sampled_from(CALLS))
    call = make()
    refuses_or_answers(call, data.draw(spoiled_arguments(call)))


@pytest.mark.parametrize("make", [make for _, make in CALLS], ids=[name for name, _ in CALLS])
def test_the_arguments_that_are_spoiled_were_good(make: Callable[[], Call]) -> None:
    """A call that refuses anyway would prove nothing."""
    call = make()
    call.function(**{name: value() for name, value in call.good.items()})


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.data())
def test_bad_input_is_refused(data: st.DataObject) -> None:
    assert_bad_input_is_refused(data)


@pytest.mark.long
@settings(max_examples=5_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_much_bad_input_is_refused(data: st.DataObject) -> None:
    assert_bad_input_is_refused(data)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(bad_values, max_size=3))
def test_a_prompt_of_anything_is_refused_or_is_tokens(prompt: list[object]) -> None:
    """What is taken is what the model knows."""
    engine = tiny_engine()
    try:
        request = engine.new_request(prompt)  # type: ignore[arg-type]  # anything
    except ERRORS:
        return
    assert request.tokens == prompt
    assert all(0 <= token < tiny_hybrid().vocab_size for token in request.tokens)


def test_weights_of_another_model_are_refused() -> None:
    """A missing tensor, a wrong shape and whole numbers, each by name."""
    name = "model.layers.1.self_attn.o_proj.weight"
    changes: list[tuple[dict[str, Any], str]] = [
        ({name: None}, f"no floating tensor '{name}'"),
        ({name: tiny_weights()[name].int()}, f"no floating tensor '{name}'"),
        ({name: tiny_weights()[name][:-1]}, "has shape"),
        ({name: tiny_weights()[name].to("meta")}, "lies on meta"),
    ]
    for change, message in changes:
        weights: Any = {**tiny_weights(), **change}
        with pytest.raises(BadInputError, match=message):
            Engine(tiny_hybrid(), weights, tiny_limits(), options=tiny_options())
