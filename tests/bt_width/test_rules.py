"""What planning refuses, once, so that it need not be checked again."""

from typing import Any

import pytest
from tests.support.kinds import EVERY_KIND
from tests.support.plans import plan, serving_limits

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    InvalidSpecError,
    MambaSpec,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
    UniformSpec,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("kernel_block_size", [48, 128, 65])
def test_a_kernel_block_divides_the_block(kernel_block_size: int) -> None:
    with pytest.raises(InvalidSpecError, match=str(kernel_block_size)):
        plan(AttentionSpec(block_size=64), 1000, kernel_block_size=kernel_block_size)


@pytest.mark.parametrize("bad", [0, -16, True, 16.0, "16"], ids=repr)
@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a_kernel_block_size_is_a_positive_int(spec: CacheSpec, bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="kernel_block_size"):
        BlockTableLayout.plan(spec, serving_limits(1000), bad)


@pytest.mark.parametrize(
    "spec",
    [
        MambaSpec(block_size=64),
        MambaSpec(block_size=64, mode="align"),
        RingSpec(block_size=64),
        UniformSpec(members={"a": MambaSpec(block_size=64)}),
        UniformSpec(members={"a": RingSpec(block_size=64)}),
    ],
    ids=["mamba-none", "mamba-align", "ring", "uniform-mamba", "uniform-ring"],
)
def test_a_recurrent_or_ring_group_is_not_split(spec: CacheSpec) -> None:
    with pytest.raises(InvalidSpecError, match="split"):
        plan(spec, 1000, kernel_block_size=32)
    assert plan(spec, 1000, kernel_block_size=64).kernel_blocks_per_block == 1


def test_a_state_does_not_cross_a_kernel_block() -> None:
    spec = AttentionSpec(block_size=64, tokens_per_state=32)

    with pytest.raises(InvalidSpecError, match="tokens_per_state"):
        plan(spec, 1000, kernel_block_size=16)
    assert plan(spec, 1000, kernel_block_size=32).tokens_per_state() == 32


def test_every_members_states_fit_the_kernel_block() -> None:
    """The one that does not fit is found wherever it stands among the others."""
    spec = UniformSpec(
        members={
            "fits": AttentionSpec(block_size=64),
            "is.wide": AttentionSpec(block_size=64, tokens_per_state=32),
            "suits": AttentionSpec(block_size=64, tokens_per_state=16),
        }
    )

    with pytest.raises(InvalidSpecError, match=r"tokens_per_state.*32"):
        plan(spec, 1000, kernel_block_size=16)


@pytest.mark.parametrize("interleave", [3, 128])
def test_a_run_of_positions_does_not_cross_a_block(interleave: int) -> None:
    with pytest.raises(InvalidSpecError, match="interleave"):
        plan(AttentionSpec(block_size=64), 1000, size=2, interleave=interleave)


def test_a_run_of_positions_may_cross_a_kernel_block() -> None:
    """Only the block bounds it: owners are decided in blocks."""
    spec = AttentionSpec(block_size=64)

    assert plan(spec, 1000, kernel_block_size=16, size=2, interleave=64).shards == 2


def test_a_state_does_not_cross_ranks() -> None:
    spec = AttentionSpec(block_size=64, tokens_per_state=4)

    with pytest.raises(InvalidSpecError, match="tokens_per_state"):
        plan(spec, 1000, size=2, interleave=2)
    assert plan(spec, 1000, size=2, interleave=8).shards == 2


def test_every_members_states_stay_on_one_rank() -> None:
    spec = UniformSpec(
        members={
            "fits": AttentionSpec(block_size=64),
            "is.wide": AttentionSpec(block_size=64, tokens_per_state=8),
        }
    )

    with pytest.raises(InvalidSpecError, match=r"tokens_per_state.*8"):
        plan(spec, 1000, size=2, interleave=4)


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        pytest.param(AttentionSpec(block_size=64, tokens_per_state=4), 1, id="one-rank"),
        pytest.param(
            AttentionSpec(block_size=64, sharded=False, tokens_per_state=4), 2, id="replicated"
        ),
        pytest.param(SlidingWindowSpec(block_size=64, window=100), 2, id="window"),
        pytest.param(MambaSpec(block_size=64, mode="align"), 2, id="mamba"),
        pytest.param(RingSpec(block_size=4), 2, id="ring"),
    ],
)
def test_interleave_does_not_concern_a_group_on_one_shard(spec: CacheSpec, size: int) -> None:
    """One interleave serves all groups of a server; here it divides no block size."""
    assert plan(spec, 1000, size=size, interleave=3).shards == 1


@pytest.mark.parametrize(
    "bad", [None, 64, "attention", AttentionSpec, {"block_size": 64}], ids=repr
)
def test_only_a_spec_is_planned(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="spec"):
        BlockTableLayout.plan(bad, serving_limits(1000))


@pytest.mark.parametrize("bad", [None, 1000, ServingLimits, {"max_model_len": 1000}], ids=repr)
def test_only_limits_plan(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="limits"):
        BlockTableLayout.plan(AttentionSpec(block_size=64), bad)
