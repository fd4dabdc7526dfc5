"""Two processes can prove that they planned the same."""

import dataclasses
import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.kinds import EVERY_KIND
from tests.support.plans import plan, plan_ranks

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    ContextParallel,
    InvalidSpecError,
    MambaSpec,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
    UniformSpec,
)

pytestmark = pytest.mark.fast

# No field holds its default, so that a field that is not written cannot come back by chance.
LIMITS = ServingLimits(
    max_model_len=1001,
    max_num_reqs=5,
    max_num_batched_tokens=77,
    num_speculative_tokens=3,
    lookahead_tokens=6,
    context_parallel=ContextParallel(size=4, rank=2, interleave=16),
)
NOTHING_IS_DEFAULT: list[Any] = [
    pytest.param(
        AttentionSpec(block_size=64, sharded=False, tokens_per_state=4, token_alignment=None),
        16,
        id="attention",
    ),
    pytest.param(
        SlidingWindowSpec(block_size=64, window=99, extra_retained_tokens=5, token_alignment=256),
        16,
        id="window",
    ),
    pytest.param(MambaSpec(block_size=64, mode="align", num_speculative_blocks=3), 64, id="mamba"),
    pytest.param(RingSpec(block_size=4), 4, id="ring"),
    pytest.param(
        UniformSpec(
            members={
                "z": AttentionSpec(block_size=64, token_alignment=None),
                "a": AttentionSpec(block_size=64, tokens_per_state=8, token_alignment=None),
            }
        ),
        16,
        id="uniform",
    ),
]


def _layouts_that_differ_in_one_fact() -> Iterator[Any]:
    """Every fact of a layout changed alone."""
    spec = AttentionSpec(block_size=64)
    of_spec: dict[str, Any] = {
        "block_size": 128,
        "sharded": False,
        "tokens_per_state": 4,
        "token_alignment": None,
    }
    of_limits: dict[str, Any] = {
        "max_model_len": 1002,
        "max_num_reqs": 6,
        "max_num_batched_tokens": 78,
        "num_speculative_tokens": 2,
        "lookahead_tokens": 5,
    }
    for field, other in of_spec.items():
        changed = dataclasses.replace(spec, **{field: other})
        yield pytest.param(BlockTableLayout.plan(changed, LIMITS, 16), id=f"spec-{field}")
    for field, other in of_limits.items():
        limits = dataclasses.replace(LIMITS, **{field: other})
        yield pytest.param(BlockTableLayout.plan(spec, limits, 16), id=f"limits-{field}")
    for field, other in {"size": 3, "interleave": 8}.items():
        parallel = dataclasses.replace(LIMITS.context_parallel, **{field: other})
        limits = dataclasses.replace(LIMITS, context_parallel=parallel)
        yield pytest.param(BlockTableLayout.plan(spec, limits, 16), id=field)
    yield pytest.param(BlockTableLayout.plan(spec, LIMITS, 32), id="kernel_block_size")
    yield pytest.param(
        BlockTableLayout.plan(UniformSpec(members={"a": spec}), LIMITS, 16), id="wrapped"
    )
    yield pytest.param(
        BlockTableLayout.plan(SlidingWindowSpec(block_size=64, window=99), LIMITS, 16), id="kind"
    )


ONE_FACT_APART = list(_layouts_that_differ_in_one_fact())


# round trip


@pytest.mark.parametrize(("spec", "kernel_block_size"), NOTHING_IS_DEFAULT)
def test_everything_comes_back(spec: CacheSpec, kernel_block_size: int) -> None:
    layout = BlockTableLayout.plan(spec, LIMITS, kernel_block_size)

    twin = BlockTableLayout.from_json(layout.to_json())

    assert twin == layout
    assert hash(twin) == hash(layout)
    assert type(twin.spec) is type(layout.spec)
    assert twin.width == layout.width


@pytest.mark.parametrize("layout", ONE_FACT_APART)
def test_every_fact_is_kept(layout: BlockTableLayout) -> None:
    assert BlockTableLayout.from_json(layout.to_json()) == layout


def test_a_members_name_may_be_any_string() -> None:
    names = ["model.layers.0.self_attn", 'ü"\n\\', "", "kind"]
    spec = UniformSpec(members={name: AttentionSpec(block_size=64) for name in names})
    layout = plan(spec, 1000)

    assert BlockTableLayout.from_json(layout.to_json()) == layout


def test_the_text_has_a_version() -> None:
    assert "version" in json.loads(plan(RingSpec(block_size=4), 1000).to_json())


def test_equal_layouts_have_one_text() -> None:
    member = AttentionSpec(block_size=64)
    one = UniformSpec(members={"a": member, "b": member})
    other = UniformSpec(members={"b": member, "a": member})

    assert plan(one, 1000).to_json() == plan(other, 1000).to_json()


# refusals


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

        with pytest.raises(InvalidSpecError, match="surprise"):
            BlockTableLayout.from_json(damaged)


@pytest.mark.parametrize(("spec", "kernel_block_size"), NOTHING_IS_DEFAULT)
def test_a_missing_field_is_refused_anywhere(spec: CacheSpec, kernel_block_size: int) -> None:
    """No default stands in for it: the writer's default may have been another."""
    text = BlockTableLayout.plan(spec, LIMITS, kernel_block_size).to_json()
    for number, field in _places(text):
        damaged = _damage(text, number, operator.methodcaller("pop", field))

        with pytest.raises(InvalidSpecError, match=field):
            BlockTableLayout.from_json(damaged)


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


def test_a_field_that_stands_twice_is_refused() -> None:
    """A parser keeps one of the two, and two processes need not keep the same."""
    text = plan(RingSpec(block_size=4), 1000).to_json()

    with pytest.raises(InvalidSpecError):
        BlockTableLayout.from_json(text[:-1] + ', "kernel_block_size": 8}')


# digest


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_all_ranks_of_a_plan_have_one_digest(spec: CacheSpec) -> None:
    layouts = plan_ranks(spec, 1000, 4, interleave=4)

    assert len({layout.digest() for layout in layouts}) == 1


@pytest.mark.parametrize("layout", ONE_FACT_APART)
def test_plans_that_differ_in_anything_else_have_two(layout: BlockTableLayout) -> None:
    same = BlockTableLayout.plan(AttentionSpec(block_size=64), LIMITS, 16)

    assert layout != same
    assert layout.digest() != same.digest()


def test_all_those_digests_differ() -> None:
    layouts = [parameter.values[0] for parameter in ONE_FACT_APART]

    assert len({layout.digest() for layout in layouts}) == len(layouts)


def test_a_digest_survives_the_text() -> None:
    layout = plan(AttentionSpec(block_size=64), 1000)

    assert BlockTableLayout.from_json(layout.to_json()).digest() == layout.digest()


def test_another_process_has_the_same_digest() -> None:
    """Whatever the seed of its hashes."""
    layout = BlockTableLayout.plan(
        UniformSpec(members={name: AttentionSpec(block_size=64) for name in "cab"}), LIMITS, 16
    )
    program = (
        "import sys; from bt_width import BlockTableLayout; "
        "print(BlockTableLayout.from_json(sys.argv[1]).digest())"
    )

    digests = {
        subprocess.run(
            [sys.executable, "-c", program, layout.to_json()],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }

    assert digests == {layout.digest()}


def test_version_1_reads_and_digests_as_it_always_did() -> None:
    """Two releases that call their text by one version agree on it to the byte."""
    layout = BlockTableLayout.plan(
        UniformSpec(
            members={
                "indexer": AttentionSpec(block_size=64, tokens_per_state=4),
                "mla": AttentionSpec(block_size=64),
            }
        ),
        LIMITS,
        16,
    )

    assert layout.to_json() == (
        '{"kernel_block_size": 16, "limits": {"context_parallel": {"interleave": 16, "rank": 2, '
        '"size": 4}, "lookahead_tokens": 6, "max_model_len": 1001, "max_num_batched_tokens": 77, '
        '"max_num_reqs": 5, "num_speculative_tokens": 3}, "spec": {"kind": "uniform", "members": '
        '{"indexer": {"block_size": 64, "kind": "attention", "sharded": true, "token_alignment": '
        '128, "tokens_per_state": 4}, "mla": {"block_size": 64, "kind": "attention", "sharded": '
        'true, "token_alignment": 128, "tokens_per_state": 1}}}, "version": 1}'
    )
    assert layout.digest() == "505948b82f3cc6a52bc2f9011a48d17743d0d2d9a5c956bf1fb4fb4df85e6c7d"


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (AttentionSpec(block_size=4), "attention"),
        (SlidingWindowSpec(block_size=4, window=9), "sliding_window"),
        (MambaSpec(block_size=4), "mamba"),
        (RingSpec(block_size=4), "ring"),
    ],
    ids=["attention", "window", "mamba", "ring"],
)
def test_version_1_names_each_kind(spec: CacheSpec, kind: str) -> None:
    assert json.loads(plan(spec, 1000).to_json())["spec"]["kind"] == kind
