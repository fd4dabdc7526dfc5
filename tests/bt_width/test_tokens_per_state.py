"""How many tokens share one stored state, member by member."""

import pytest
from tests.support.plans import plan

from bt_width import (
    AttentionSpec,
    CacheSpec,
    InvalidSpecError,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    UniformSpec,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "spec",
    [MambaSpec(block_size=64), RingSpec(block_size=4), SlidingWindowSpec(block_size=16, window=8)],
    ids=["mamba", "ring", "window"],
)
def test_a_kind_that_does_not_compress_has_one_token_a_state(spec: CacheSpec) -> None:
    assert plan(spec, 1000).tokens_per_state() == 1


def test_tokens_per_state_of_a_member() -> None:
    spec = UniformSpec(
        members={
            "indexer": AttentionSpec(block_size=64, tokens_per_state=4),
            "mla": AttentionSpec(block_size=64),
        }
    )
    layout = plan(spec, 1000)

    assert layout.tokens_per_state("indexer") == 4
    assert layout.tokens_per_state("mla") == 1


def test_an_unknown_member_is_refused_with_those_there_are() -> None:
    layout = plan(UniformSpec(members={"mla": AttentionSpec(block_size=64)}), 1000)

    with pytest.raises(InvalidSpecError, match="mla"):
        layout.tokens_per_state("indexer")


def test_members_that_agree_need_no_name() -> None:
    member = AttentionSpec(block_size=64, tokens_per_state=4)

    assert plan(UniformSpec(members={"a": member, "b": member}), 1000).tokens_per_state() == 4


def test_members_that_differ_have_to_be_named() -> None:
    """No size stands for another: slots of one member divided by the other's are wrong."""
    spec = UniformSpec(
        members={
            "indexer": AttentionSpec(block_size=64, tokens_per_state=4),
            "mla": AttentionSpec(block_size=64),
        }
    )

    with pytest.raises(InvalidSpecError, match=r"1.*4"):
        plan(spec, 1000).tokens_per_state()


def test_a_group_of_one_layer_has_no_members() -> None:
    with pytest.raises(InvalidSpecError, match="mla"):
        plan(AttentionSpec(block_size=64), 1000).tokens_per_state("mla")
