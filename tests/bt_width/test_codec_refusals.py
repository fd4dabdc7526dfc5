"""What is no text of a layout is refused wherever it is wrong."""

import json
import operator
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.distinct_layouts import LIMITS, NOTHING_IS_DEFAULT
from tests.support.plans import plan

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    InvalidSpecError,
    RingSpec,
)

pytestmark = pytest.mark.fast


def _objects(value: Any) -> list[dict[str, Any]]:
    """Every JSON object inside a value, itself first, but not the mapping of members by name."""
    if not isinstance(value, dict):
        return []
    inside = [found for inner in value.values() for found in _objects(inner)]
    by_name = value.keys() <= {"a", "z"}
    return inside if by_name else [value, *inside]


def _places(text: str) -> list[tuple[int, str]]:
    """Every field of a text: the number of its object, and its name."""
    return [
        (number, field)
        for number, fields in enumerate(_objects(json.loads(text)))
        for field in fields
    ]


def _damage(text: str, number: int, change: Callable[[dict[str, Any]], object]) -> str:
    """The text with a change made to one of its objects."""
    tree = json.loads(text)
    change(_objects(tree)[number])
    return json.dumps(tree)


@pytest.mark.parametrize(("spec", "kernel_block_size"), NOTHING_IS_DEFAULT)
def test_an_unknown_field_is_refused_anywhere(spec: CacheSpec, kernel_block_size: int) -> None:
    """A field of a newer writer is never dropped in silence."""
    text = BlockTableLayout.plan(spec, LIMITS, kernel_block_size).to_json()
    numbers = {number for number, _ in _places(text)}
    assert len(numbers) >= 4
    for number in numbers:
        damaged = _damage(text, number, lambda fields: fields.update(surprise=1))

        with pytest.raises(InvalidSpecError, match="surprise") as caught:
            BlockTableLayout.from_json(damaged)
        assert caught.value.details == {"unknown": ["surprise"], "missing": []}


@pytest.mark.parametrize(("spec", "kernel_block_size"), NOTHING_IS_DEFAULT)
def test_a_missing_field_is_refused_anywhere(spec: CacheSpec, kernel_block_size: int) -> None:
    """No default stands in for it: the writer's default may have been another."""
    text = BlockTableLayout.plan(spec, LIMITS, kernel_block_size).to_json()
    for number, field in _places(text):
        damaged = _damage(text, number, operator.methodcaller("pop", field))

        with pytest.raises(InvalidSpecError, match=field) as caught:
            BlockTableLayout.from_json(damaged)
        if field != "kind":
            assert caught.value.details == {"unknown": [], "missing": [field]}


@pytest.mark.parametrize("value", [None, "many", 1.5, [], {}, -1], ids=repr)
@pytest.mark.parametrize(("spec", "kernel_block_size"), NOTHING_IS_DEFAULT)
def test_a_wrong_value_is_refused_anywhere(
    spec: CacheSpec, kernel_block_size: int, value: object
) -> None:
    text = BlockTableLayout.plan(spec, LIMITS, kernel_block_size).to_json()
    for number, field in _places(text):
        if field == "token_alignment" and value is None:
            continue  # the one field that may be null
        damaged = _damage(text, number, operator.methodcaller("update", {field: value}))

        with pytest.raises(InvalidSpecError):
            BlockTableLayout.from_json(damaged)


def test_another_version_is_refused_with_both_versions() -> None:
    tree = json.loads(plan(RingSpec(block_size=4), 1000).to_json())
    tree["version"] = 4711

    with pytest.raises(InvalidSpecError, match="4711") as caught:
        BlockTableLayout.from_json(json.dumps(tree))

    assert str(json.loads(plan(RingSpec(block_size=4), 1000).to_json())["version"]) in str(
        caught.value
    )


def test_a_version_is_not_a_bool() -> None:
    """``True`` equals 1 in Python, and is no version."""
    tree = json.loads(plan(RingSpec(block_size=4), 1000).to_json())
    tree["version"] = True

    with pytest.raises(InvalidSpecError, match="version"):
        BlockTableLayout.from_json(json.dumps(tree))


def test_an_unknown_kind_is_refused_by_name() -> None:
    text = plan(RingSpec(block_size=4), 1000).to_json().replace('"ring"', '"cross-attention"')

    with pytest.raises(InvalidSpecError, match="cross-attention"):
        BlockTableLayout.from_json(text)


def test_what_plan_refuses_from_json_refuses() -> None:
    text = plan(AttentionSpec(block_size=64), 1000, kernel_block_size=16).to_json()
    tree = json.loads(text)
    tree["kernel_block_size"] = 48

    with pytest.raises(InvalidSpecError, match="48"):
        BlockTableLayout.from_json(json.dumps(tree))


@pytest.mark.parametrize(
    "bad",
    ["", "{", "nonsense", "null", "1", "[]", "{}", '"text"', "NaN", "[" * 100_000, None, 1, b"{}"],
    ids=lambda bad: repr(bad)[:12],
)
def test_what_is_no_layout_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidSpecError):
        BlockTableLayout.from_json(bad)


@pytest.mark.parametrize("digits", [19, 400, 4_299, 4_300, 4_301, 100_000])
@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize(("spec", "kernel_block_size"), NOTHING_IS_DEFAULT)
def test_a_number_of_any_length_is_refused_in_a_line(
    spec: CacheSpec, kernel_block_size: int, sign: str, digits: int
) -> None:
    """Python cannot even print a number of more than 4,300 digits."""
    text = BlockTableLayout.plan(spec, LIMITS, kernel_block_size).to_json()
    number = sign + "9" * digits
    for place, field in _places(text):
        marked = _damage(text, place, operator.methodcaller("update", {field: "HERE"}))

        with pytest.raises(InvalidSpecError) as caught:
            BlockTableLayout.from_json(marked.replace('"HERE"', number))
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["x" * 10**6, "\0", "\ud800", "\n"], ids=ascii)
def test_a_field_of_any_name_is_refused_in_a_line(name: str) -> None:
    tree = json.loads(plan(RingSpec(block_size=4), 1000).to_json())
    tree[name] = 1

    with pytest.raises(InvalidSpecError, match="unknown") as caught:
        BlockTableLayout.from_json(json.dumps(tree))
    assert len(str(caught.value)) < 300


def test_an_unknown_field_says_what_to_do() -> None:
    text = plan(RingSpec(block_size=4), 1000).to_json()

    with pytest.raises(InvalidSpecError, match="must run the same bt-width"):
        BlockTableLayout.from_json(text[:-1] + ', "newer": 4}')


def test_a_field_that_stands_twice_is_refused() -> None:
    """A parser keeps one of the two, and two processes need not keep the same."""
    text = plan(RingSpec(block_size=4), 1000).to_json()

    with pytest.raises(InvalidSpecError, match="twice"):
        BlockTableLayout.from_json(text[:-1] + ', "kernel_block_size": 4}')
