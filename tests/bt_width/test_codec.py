"""A layout as text and back: everything comes back, and version 1 stays version 1."""

import json

import pytest
from tests.support.distinct_layouts import LIMITS, NOTHING_IS_DEFAULT, ONE_FIELD_APART
from tests.support.plans import plan

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    UniformSpec,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("spec", "kernel_block_size"), NOTHING_IS_DEFAULT)
def test_everything_comes_back(spec: CacheSpec, kernel_block_size: int) -> None:
    layout = BlockTableLayout.plan(spec, LIMITS, kernel_block_size)

    copy = BlockTableLayout.from_json(layout.to_json())

    assert copy == layout
    assert hash(copy) == hash(layout)
    assert type(copy.spec) is type(layout.spec)
    assert copy.width == layout.width


@pytest.mark.parametrize("layout", ONE_FIELD_APART)
def test_every_field_is_kept(layout: BlockTableLayout) -> None:
    assert BlockTableLayout.from_json(layout.to_json()) == layout


def test_a_members_name_may_be_any_string() -> None:
    names = ["model.layers.0.self_attn", 'ü"\n\\', "", "kind"]
    spec = UniformSpec(members={name: AttentionSpec(block_size=64) for name in names})
    layout = plan(spec, 1000)

    assert BlockTableLayout.from_json(layout.to_json()) == layout


def test_a_group_may_have_as_many_members_as_a_model_has_layers() -> None:
    members = {f"layers.{number}": AttentionSpec(block_size=64) for number in range(1000)}
    layout = plan(UniformSpec(members=members), 1000)

    assert BlockTableLayout.from_json(layout.to_json()) == layout


def test_the_text_has_a_version() -> None:
    assert "version" in json.loads(plan(RingSpec(block_size=4), 1000).to_json())


def test_equal_layouts_have_one_text() -> None:
    member = AttentionSpec(block_size=64)
    one = UniformSpec(members={"a": member, "b": member})
    other = UniformSpec(members={"b": member, "a": member})

    assert plan(one, 1000).to_json() == plan(other, 1000).to_json()


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
