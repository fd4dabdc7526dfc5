"""What a public call takes and what it refuses, at the edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.bt_runner.harness import (
    decode_densely,
    tiny_engine,
    tiny_hybrid,
    tiny_limits,
    tiny_options,
    tiny_weights,
)

from bt_runner.arguments import as_tokens, require_int
from bt_runner.cuda_graphs import GraphOptions
from bt_runner.engine import Engine
from bt_runner.errors import BadInputError
from bt_runner.model_runner import InFlightStep, ModelRunner
from bt_runner.models.caches import LARGEST_BLOCK, CacheOptions
from bt_runner.requests import SamplingParams
from bt_runner.scheduler import SchedulerOutput


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param([0, 60], id="the-first-and-the-last"),
        pytest.param(b"\x00\x3c", id="bytes"),
        pytest.param(np.array([0, 60], dtype=np.int16), id="array"),
        pytest.param(torch.tensor([0, 60]), id="tensor"),
        pytest.param(iter([0, 60]), id="iterator"),
    ],
)
def test_tokens_of_any_sequence_become_a_list(tokens: Any) -> None:
    assert as_tokens("the prompt", tokens, 61) == [0, 60]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        pytest.param([3, 61], "token 61, and the model knows 61", id="one-past-the-last"),
        pytest.param([-1], "token -1", id="below-the-first"),
        pytest.param("abc", "must be tokens", id="text"),
        pytest.param([1.0], "must be tokens", id="a-float"),
        pytest.param(None, "must be a sequence", id="nothing"),
        pytest.param(torch.tensor(3), "must be a sequence", id="no-dimension"),
        pytest.param(torch.tensor([3], device="meta"), "must be tokens", id="no-data"),
    ],
)
def test_what_is_no_token_is_refused(tokens: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        as_tokens("the prompt", tokens, 61)


def test_bounds_of_a_number_are_inclusive() -> None:
    """And a bool is no number."""
    require_int("size", 1, minimum=1, maximum=1)
    for value, message in ((0, "at least 1"), (2, "at most 1"), (True, "an int"), (1.0, "an int")):
        with pytest.raises(BadInputError, match=message):
            require_int("size", value, minimum=1, maximum=1)


def test_a_block_may_be_as_large_as_the_largest() -> None:
    """One token more is a slip."""
    CacheOptions(mamba_block_size=LARGEST_BLOCK)
    with pytest.raises(BadInputError, match=f"at most {LARGEST_BLOCK}, got {LARGEST_BLOCK + 1}"):
        CacheOptions(mamba_block_size=LARGEST_BLOCK + 1)


@pytest.mark.parametrize("num_blocks", [[9, 9], [9, 9, 9, 9], []], ids=["few", "many", "none"])
def test_as_many_pools_as_groups_are_wanted(num_blocks: list[int]) -> None:
    with pytest.raises(BadInputError, match=f"{len(num_blocks)} pools, and the model 3"):
        tiny_engine(num_blocks=num_blocks)


def test_a_request_that_is_not_there_cannot_be_aborted() -> None:
    """Neither one that ended."""
    engine = tiny_engine()
    engine.add_request([1, 2], SamplingParams(max_new_tokens=1))
    engine.step()
    with pytest.raises(BadInputError, match="no request 'request-0'"):
        engine.abort("request-0")


def test_where_one_prompt_is_bad_none_is_added() -> None:
    """A stream begins with all of its requests or with none."""
    engine = tiny_engine()
    with pytest.raises(BadInputError, match="token 61"):
        next(engine.generate([[1], [61]], SamplingParams(max_new_tokens=1)))
    assert not engine.has_work


class Talkative:
    """Proposes more than it is asked for, or what is no token."""

    def __init__(self, proposal: Sequence[int]) -> None:
        """Take what is proposed each time."""
        self._proposal = proposal

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Say the same every time."""
        return self._proposal


def _drafted(proposal: Sequence[int]) -> Engine:
    return tiny_engine(
        tiny_limits(num_speculative_tokens=2),
        tiny_options(num_speculative_blocks=2),
        drafter=Talkative(proposal),
    )


def test_drafts_beyond_those_asked_for_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step was planned for two."""
    counts: set[int] = set()
    launch = ModelRunner.launch

    def look(
        self: ModelRunner, step: int, batch: SchedulerOutput, *rest: Any, **named: Any
    ) -> InFlightStep:
        counts.update(batch.num_drafts.tolist())
        return launch(self, step, batch, *rest, **named)

    monkeypatch.setattr(ModelRunner, "launch", look)
    engine = _drafted([1, 2, 3, 4, 5])
    params = SamplingParams(max_new_tokens=9)
    request = engine.add_request([5, 6, 7], params)
    while engine.has_work:
        engine.step()
    assert max(counts) == 2
    assert request.output == decode_densely([5, 6, 7], params)


def test_a_draft_that_is_no_token_is_refused_before_a_step() -> None:
    """By the name of who proposed it, and no token is lost."""
    engine = _drafted([61])
    request = engine.add_request([5, 6, 7], SamplingParams(max_new_tokens=4))
    engine.step()
    with pytest.raises(BadInputError, match="what the drafter proposes holds token 61"):
        engine.step()
    assert len(request.output) == 1
    assert request.row is not None


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        pytest.param("config", "hybrid", "config must be a ModelConfig", id="config"),
        pytest.param("limits", 96, "limits must be a ServingLimits", id="limits"),
        pytest.param("options", {}, "options must be a CacheOptions", id="options"),
        pytest.param("graphs", (1, 2), "graphs must be a GraphOptions", id="graphs"),
        pytest.param("drafter", object(), "drafter has no propose", id="drafter"),
        pytest.param("ranks", 2, "ranks has no size", id="ranks"),
        pytest.param("sanitizes", 1, "sanitizes must be a bool", id="sanitizes"),
        pytest.param("max_steps_in_flight", 0, "must be at least 1", id="no-step"),
        pytest.param("max_steps_in_flight", 3, "must be at most 2", id="three-steps"),
    ],
)
def test_an_engine_says_which_argument_is_wrong(argument: str, value: Any, message: str) -> None:
    arguments: dict[str, Any] = {
        "config": tiny_hybrid(),
        "weights": tiny_weights(),
        "limits": tiny_limits(),
        "options": tiny_options(),
    }
    with pytest.raises(BadInputError, match=message):
        Engine(**{**arguments, argument: value})


def test_sizes_that_can_be_read_once_alone_are_refused() -> None:
    """A check would have read them, and no graph would be captured."""
    sizes: Any = iter([1, 2])
    with pytest.raises(BadInputError, match="batch_sizes must be a tuple"):
        GraphOptions(batch_sizes=sizes)
