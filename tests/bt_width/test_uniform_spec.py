"""Layers that share one table: what they may differ in, and how the others are refused."""

import dataclasses
import itertools
from typing import Any

import pytest

from bt_width import (
    AttentionSpec,
    InvalidSpecError,
    LayerSpec,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    UniformSpec,
)

pytestmark = pytest.mark.fast

INDEXER = AttentionSpec(block_size=64, tokens_per_state=4)
MLA = AttentionSpec(block_size=64)
ONE_OF_EACH_KIND: list[LayerSpec] = [
    MLA,
    SlidingWindowSpec(block_size=64, window=128),
    MambaSpec(block_size=64),
    RingSpec(block_size=64),
]


def test_members_are_sorted_pairs() -> None:
    spec = UniformSpec(members={"mla": MLA, "indexer": INDEXER})

    assert spec.members == (("indexer", INDEXER), ("mla", MLA))


def test_the_order_in_which_members_are_named_does_not_matter() -> None:
    one = UniformSpec(members={"mla": MLA, "indexer": INDEXER})
    other = UniformSpec(members={"indexer": INDEXER, "mla": MLA})

    assert {one: "first"}[other] == "first"


def test_a_uniform_spec_is_frozen() -> None:
    spec: Any = UniformSpec(members={"mla": MLA})

    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.members = ()


def test_a_uniform_spec_holds_its_members_and_nothing_else() -> None:
    assert not hasattr(UniformSpec(members={"mla": MLA}), "__dict__")


def test_a_uniform_spec_does_not_follow_the_mapping_it_was_given() -> None:
    members: dict[str, LayerSpec] = {"mla": MLA}
    spec = UniformSpec(members=members)

    members["indexer"] = INDEXER

    assert spec.members == (("mla", MLA),)


@pytest.mark.parametrize("member", ONE_OF_EACH_KIND, ids=repr)
def test_members_of_every_kind_may_share_a_table(member: LayerSpec) -> None:
    assert UniformSpec(members={"a": member, "b": member}).members == (("a", member), ("b", member))


def test_members_may_differ_in_tokens_per_state() -> None:
    """An indexer with one key a token shares the table of a compressed cache."""
    assert len(UniformSpec(members={"mla": MLA, "indexer": INDEXER}).members) == 2


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("block_size", MLA, AttentionSpec(block_size=32)),
        ("sharded", MLA, AttentionSpec(block_size=64, sharded=False)),
        ("token_alignment", MLA, AttentionSpec(block_size=64, token_alignment=None)),
        (
            "window",
            SlidingWindowSpec(block_size=16, window=8),
            SlidingWindowSpec(block_size=16, window=9),
        ),
        (
            "extra_retained_tokens",
            SlidingWindowSpec(block_size=16, window=8),
            SlidingWindowSpec(block_size=16, window=8, extra_retained_tokens=1),
        ),
        (
            "token_alignment",
            SlidingWindowSpec(block_size=16, window=8),
            SlidingWindowSpec(block_size=16, window=8, token_alignment=64),
        ),
        ("mode", MambaSpec(block_size=16), MambaSpec(block_size=16, mode="align")),
        (
            "num_speculative_blocks",
            MambaSpec(block_size=16),
            MambaSpec(block_size=16, num_speculative_blocks=2),
        ),
        ("block_size", MambaSpec(block_size=16), MambaSpec(block_size=32)),
        ("block_size", RingSpec(block_size=4), RingSpec(block_size=8)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_members_that_differ_are_refused_by_name_and_field(
    field: str, one: LayerSpec, other: LayerSpec
) -> None:
    """Any other difference gives two widths, or two owners of a token, in one table.

    Reported as https://github.com/vllm-project/vllm/issues/50825
    and https://github.com/vllm-project/vllm/pull/50823
    """
    with pytest.raises(InvalidSpecError, match=field) as caught:
        UniformSpec(members={"first.layer": one, "second.layer": other})

    assert "first.layer" in str(caught.value)
    assert "second.layer" in str(caught.value)


def test_a_third_member_that_differs_is_found() -> None:
    members: dict[str, LayerSpec] = {"a": MLA, "b": INDEXER, "odd": AttentionSpec(block_size=128)}

    with pytest.raises(InvalidSpecError, match="odd"):
        UniformSpec(members=members)


@pytest.mark.parametrize(
    ("one", "other"), list(itertools.combinations(ONE_OF_EACH_KIND, 2)), ids=repr
)
def test_members_of_two_kinds_are_refused_with_both_kinds(one: LayerSpec, other: LayerSpec) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        UniformSpec(members={"first.layer": one, "second.layer": other})

    for word in ("first.layer", "second.layer", type(one).__name__, type(other).__name__):
        assert word in str(caught.value)


def test_a_uniform_spec_is_not_empty() -> None:
    with pytest.raises(InvalidSpecError, match="member"):
        UniformSpec(members={})


def test_a_uniform_spec_is_not_nested() -> None:
    nested: Any = UniformSpec(members={"mla": MLA})

    with pytest.raises(InvalidSpecError, match="outer"):
        UniformSpec(members={"outer": nested})


@pytest.mark.parametrize(
    "bad",
    [None, 1, "mla", [MLA], {"mla": 64}, {"mla": None}, {1: MLA}, {"mla": AttentionSpec}],
    ids=["none", "int", "str", "list", "int-member", "none-member", "int-name", "class-member"],
)
def test_members_are_specs_by_name(bad: Any) -> None:
    with pytest.raises(InvalidSpecError):
        UniformSpec(members=bad)


def test_members_may_come_as_the_pairs_they_are_stored_as() -> None:
    """As ``dataclasses.replace`` hands them on."""
    spec = UniformSpec(members={"mla": MLA, "indexer": INDEXER})

    assert dataclasses.replace(spec) == spec


def test_a_name_that_stands_twice_is_refused() -> None:
    """Neither of the two is dropped in silence."""
    pairs: Any = [("mla", MLA), ("mla", INDEXER)]

    with pytest.raises(InvalidSpecError, match="mla"):
        UniformSpec(members=pairs)
