"""What a server promises its requests: lengths, counts, and its context-parallel shape."""

import dataclasses
import inspect
from typing import Any

import pytest

from bt_width import ContextParallel, InvalidSpecError, ServingLimits

pytestmark = pytest.mark.fast

GOOD_LIMITS: dict[str, Any] = {
    "max_model_len": 100,
    "max_num_reqs": 4,
    "max_num_batched_tokens": 64,
    "num_speculative_tokens": 2,
    "lookahead_tokens": 3,
    "context_parallel": ContextParallel(size=4, rank=3, interleave=8),
}


def test_limits_say_what_they_were_given() -> None:
    limits = ServingLimits(**GOOD_LIMITS)

    assert {name: getattr(limits, name) for name in GOOD_LIMITS} == GOOD_LIMITS


def test_only_lengths_and_counts_have_to_be_said() -> None:
    limits = ServingLimits(max_model_len=100, max_num_reqs=4, max_num_batched_tokens=64)

    assert limits.num_speculative_tokens == 0
    assert limits.lookahead_tokens == 0
    assert limits.context_parallel == ContextParallel(size=1, rank=0, interleave=1)


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "8", None], ids=repr)
@pytest.mark.parametrize("field", ["max_model_len", "max_num_reqs", "max_num_batched_tokens"])
def test_a_limit_is_a_positive_int(field: str, bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match=field):
        ServingLimits(**{**GOOD_LIMITS, field: bad})


@pytest.mark.parametrize("bad", [-1, False, 1.0, "8", None], ids=repr)
@pytest.mark.parametrize("field", ["num_speculative_tokens", "lookahead_tokens"])
def test_an_extra_is_a_count(field: str, bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match=field):
        ServingLimits(**{**GOOD_LIMITS, field: bad})


@pytest.mark.parametrize("bad", [None, 2, (1, 0, 1)], ids=repr)
def test_context_parallelism_has_its_own_type(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="context_parallel"):
        ServingLimits(**{**GOOD_LIMITS, "context_parallel": bad})


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "2", None], ids=repr)
@pytest.mark.parametrize("field", ["size", "interleave"])
def test_a_context_parallel_number_is_a_positive_int(field: str, bad: Any) -> None:
    good: dict[str, Any] = {"size": 2, "rank": 0, "interleave": 1}

    with pytest.raises(InvalidSpecError, match=field):
        ContextParallel(**{**good, field: bad})


@pytest.mark.parametrize("bad", [-1, 2, 3, True, 0.0, "0", None], ids=repr)
def test_a_rank_lies_below_the_size(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="rank"):
        ContextParallel(size=2, rank=bad)


def test_the_last_rank_is_a_rank() -> None:
    assert ContextParallel(size=2, rank=1).rank == 1


@pytest.mark.parametrize(
    "value", [ContextParallel(size=2), ServingLimits(**GOOD_LIMITS)], ids=lambda v: type(v).__name__
)
def test_a_value_is_frozen_and_hashable(value: Any) -> None:
    """Two equal values are one key of a dict, and neither can change under it."""
    equal = dataclasses.replace(value)

    assert {value: "first"}[equal] == "first"
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, getattr(value, field.name))


@pytest.mark.parametrize("kind", [ContextParallel, ServingLimits])
def test_a_limit_is_only_given_by_name(kind: Any) -> None:
    """Two limits in a wrong order would be two valid limits."""
    parameters = inspect.signature(kind).parameters.values()

    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    "value", [ContextParallel(size=2), ServingLimits(**GOOD_LIMITS)], ids=lambda v: type(v).__name__
)
def test_limits_hold_their_fields_and_nothing_else(value: object) -> None:
    assert not hasattr(value, "__dict__")


@pytest.mark.parametrize("field", sorted(GOOD_LIMITS))
def test_limits_that_differ_anywhere_are_unequal(field: str) -> None:
    other = ContextParallel() if field == "context_parallel" else 5

    assert ServingLimits(**{**GOOD_LIMITS, field: other}) != ServingLimits(**GOOD_LIMITS)
