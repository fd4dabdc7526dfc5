"""One frozen type per kind of cache group; what each refuses."""

import dataclasses
import inspect
import itertools
import typing
from typing import Any

import pytest
from tests.support.plans import serving_limits

import bt_width
from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    InvalidSpecError,
    LayerSpec,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    UniformSpec,
)

pytestmark = pytest.mark.fast

KINDS: list[Any] = [AttentionSpec, SlidingWindowSpec, MambaSpec, RingSpec]
GOOD: dict[Any, dict[str, Any]] = {
    AttentionSpec: {
        "block_size": 64,
        "sharded": False,
        "tokens_per_state": 4,
        "token_alignment": 256,
    },
    SlidingWindowSpec: {
        "block_size": 16,
        "window": 4096,
        "extra_retained_tokens": 7,
        "token_alignment": None,
    },
    MambaSpec: {"block_size": 640, "mode": "align", "num_speculative_blocks": 3},
    RingSpec: {"block_size": 4},
}
EVERY_FIELD = [(kind, field) for kind, fields in GOOD.items() for field in fields]


def _id(value: object) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


@pytest.mark.parametrize("kind", KINDS, ids=_id)
def test_a_spec_says_what_it_was_given(kind: Any) -> None:
    spec = kind(**GOOD[kind])

    assert {name: getattr(spec, name) for name in GOOD[kind]} == GOOD[kind]


@pytest.mark.parametrize(
    ("spec", "defaults"),
    [
        (
            AttentionSpec(block_size=16),
            {"sharded": True, "tokens_per_state": 1, "token_alignment": 128},
        ),
        (
            SlidingWindowSpec(block_size=16, window=64),
            {"extra_retained_tokens": 0, "token_alignment": 128},
        ),
        (MambaSpec(block_size=16), {"mode": "none", "num_speculative_blocks": 0}),
    ],
    ids=["attention", "window", "mamba"],
)
def test_defaults_of_a_spec(spec: LayerSpec, defaults: dict[str, Any]) -> None:
    assert {name: getattr(spec, name) for name in defaults} == defaults


@pytest.mark.parametrize(("kind", "field"), EVERY_FIELD, ids=_id)
def test_a_spec_is_frozen(kind: Any, field: str) -> None:
    spec = kind(**GOOD[kind])

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(spec, field, GOOD[kind][field])


@pytest.mark.parametrize("kind", [*KINDS, UniformSpec], ids=_id)
def test_a_field_is_only_given_by_name(kind: Any) -> None:
    """Two sizes in a wrong order would be two valid sizes."""
    parameters = inspect.signature(kind).parameters.values()

    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("kind", KINDS, ids=_id)
def test_a_spec_holds_its_fields_and_nothing_else(kind: Any) -> None:
    assert not hasattr(kind(**GOOD[kind]), "__dict__")


@pytest.mark.parametrize("kind", KINDS, ids=_id)
def test_equal_specs_are_one_key(kind: Any) -> None:
    assert {kind(**GOOD[kind]): "first"}[kind(**GOOD[kind])] == "first"


@pytest.mark.parametrize(
    ("kind", "field", "other"),
    [
        (AttentionSpec, "block_size", 32),
        (AttentionSpec, "sharded", True),
        (AttentionSpec, "tokens_per_state", 1),
        (AttentionSpec, "token_alignment", None),
        (SlidingWindowSpec, "block_size", 32),
        (SlidingWindowSpec, "window", 4097),
        (SlidingWindowSpec, "extra_retained_tokens", 0),
        (SlidingWindowSpec, "token_alignment", 128),
        (MambaSpec, "block_size", 16),
        (MambaSpec, "mode", "none"),
        (MambaSpec, "num_speculative_blocks", 0),
        (RingSpec, "block_size", 8),
    ],
    ids=_id,
)
def test_specs_that_differ_in_one_field_are_unequal(kind: Any, field: str, other: object) -> None:
    assert kind(**{**GOOD[kind], field: other}) != kind(**GOOD[kind])


@pytest.mark.parametrize(
    ("one", "other"), list(itertools.permutations([*KINDS, UniformSpec], 2)), ids=_id
)
def test_no_kind_inherits_from_another(one: type, other: type) -> None:
    """A ring that was a window by inheritance took over the window's slots.

    Reported as https://github.com/vllm-project/vllm/pull/57317
    and https://github.com/vllm-project/vllm/pull/53906
    """
    assert not issubclass(one, other)


def test_kinds_with_equal_fields_are_unequal() -> None:
    ring: LayerSpec = RingSpec(block_size=4)

    assert ring != MambaSpec(block_size=4)


def test_the_union_is_closed() -> None:
    """What a ``match`` over a spec has to handle is exactly what there is."""
    assert set(typing.get_args(LayerSpec)) == set(KINDS)
    assert set(typing.get_args(bt_width.CacheSpec)) == {*KINDS, UniformSpec}


@pytest.mark.parametrize("bad", [0, -1, True, 16.0, "16", None], ids=repr)
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *((kind, "block_size") for kind in KINDS),
        (AttentionSpec, "tokens_per_state"),
        (SlidingWindowSpec, "window"),
    ],
    ids=_id,
)
def test_a_size_is_a_positive_int(kind: Any, field: str, bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match=field):
        kind(**{**GOOD[kind], field: bad})


@pytest.mark.parametrize("bad", [-1, False, 1.0, "1", None], ids=repr)
@pytest.mark.parametrize(
    ("kind", "field"),
    [(SlidingWindowSpec, "extra_retained_tokens"), (MambaSpec, "num_speculative_blocks")],
    ids=_id,
)
def test_an_extra_is_a_count(kind: Any, field: str, bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match=field):
        kind(**{**GOOD[kind], field: bad})


@pytest.mark.parametrize("bad", [0, -128, True, 128.0, "128"], ids=repr)
@pytest.mark.parametrize("kind", [AttentionSpec, SlidingWindowSpec], ids=_id)
def test_an_alignment_is_positive_or_none(kind: Any, bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="token_alignment"):
        kind(**{**GOOD[kind], "token_alignment": bad})


@pytest.mark.parametrize("bad", [0, 1, "yes", None], ids=repr)
def test_sharded_is_a_bool(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="sharded"):
        AttentionSpec(block_size=16, sharded=bad)


@pytest.mark.parametrize("bad", ["all", "ALIGN", "", None, True, 1, ["align"]], ids=repr)
def test_a_mode_is_one_of_two(bad: Any) -> None:
    """The removed mode "all" is refused as any other word is, an unhashable value too."""
    with pytest.raises(InvalidSpecError, match="mode"):
        MambaSpec(block_size=16, mode=bad)


def test_a_refusal_says_the_number() -> None:
    with pytest.raises(InvalidSpecError, match="-17"):
        AttentionSpec(block_size=-17)


def test_a_kind_derived_from_another_is_refused() -> None:
    """It would be planned as what it derives from, whatever it says of itself.

    Reported as https://github.com/vllm-project/vllm/pull/57317
    and https://github.com/vllm-project/vllm/pull/53906
    """
    derived: Any = type("Derived", (RingSpec,), {})

    with pytest.raises(InvalidSpecError, match="Derived"):
        BlockTableLayout.plan(derived(block_size=4), serving_limits(100))
    with pytest.raises(InvalidSpecError, match="Derived"):
        UniformSpec(members={"layer": derived(block_size=4)})
