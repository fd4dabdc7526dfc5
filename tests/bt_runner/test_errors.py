"""Errors cross processes whole, and echo no value at length."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest

from bt_runner import errors
from bt_runner.arguments import require_int, require_kind
from bt_runner.errors import BadInputError, RunnerError

CLASSES = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, RunnerError)
]


def _fail() -> None:
    raise BadInputError("a worker failed", path="x", numbers=[1, 2])


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_round_trip_through_pickle(kind: type[RunnerError]) -> None:
    """Text and details are equal; what cannot be pickled comes as its text."""
    error = kind("it went wrong at 3", position=3, name="x", handle=open)

    back = pickle.loads(pickle.dumps(error))

    assert type(back) is kind
    assert str(back) == str(error)
    assert back.details["position"] == 3
    assert back.details["name"] == "x"


def test_a_process_pool_hands_an_error_over() -> None:
    """With its details."""
    with ProcessPoolExecutor(1) as pool, pytest.raises(BadInputError, match="failed") as raised:
        pool.submit(_fail).result()

    assert raised.value.details == {"path": "x", "numbers": [1, 2]}


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("x" * 10**6, id="text"),
        pytest.param([0] * 10**6, id="list"),
        pytest.param(10**5000, id="number"),
        pytest.param({"a": "b" * 10**6}, id="mapping"),
    ],
)
def test_messages_echo_no_long_value(value: object) -> None:
    """A line is enough to recognise it."""
    with pytest.raises(BadInputError) as wrong_kind:
        require_kind("it", value, float)
    with pytest.raises(BadInputError) as wrong_number:
        require_int("it", value, maximum=3)

    assert len(str(wrong_kind.value)) < 400
    assert len(str(wrong_number.value)) < 400
