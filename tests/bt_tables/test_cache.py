"""Promises of caches: one shape in kernel blocks, and writers that skip padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.poison import CANARY

from bt_tables import kernel_block_view, kv_cache_shape, state_slots, write_states
from bt_width import (
    PAD_SLOT,
    AttentionSpec,
    BlockTableLayout,
    InvalidEditError,
    InvalidSpecError,
    MambaSpec,
    RingSpec,
    ServingLimits,
    UniformSpec,
    WidthMismatchError,
)

pytestmark = pytest.mark.fast

LIMITS = ServingLimits(max_model_len=512, max_num_reqs=2, max_num_batched_tokens=8)
COMPRESSED = UniformSpec(
    members={
        "latent": AttentionSpec(block_size=128),
        "indexer": AttentionSpec(block_size=128, tokens_per_state=4),
    }
)


@pytest.mark.parametrize(
    ("layout", "member", "expected"),
    [
        pytest.param(
            BlockTableLayout.plan(AttentionSpec(block_size=128), LIMITS, 64),
            None,
            (3626, 64, 4, 128),
            id="attention-split-in-two",
        ),
        pytest.param(
            BlockTableLayout.plan(COMPRESSED, LIMITS, 64),
            "indexer",
            (3626, 16, 4, 128),
            id="compressed-member",
        ),
        pytest.param(
            BlockTableLayout.plan(MambaSpec(block_size=64), LIMITS),
            None,
            (1813, 4, 128),
            id="mamba",
        ),
        pytest.param(
            BlockTableLayout.plan(RingSpec(block_size=8), LIMITS),
            None,
            (1813, 8, 4, 128),
            id="ring",
        ),
    ],
)
def test_a_connector_registers_kernel_blocks(
    layout: BlockTableLayout, member: str | None, expected: tuple[int, ...]
) -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/42846
    and https://github.com/vllm-project/vllm/pull/42766
    and https://github.com/vllm-project/vllm/pull/28677
    """
    assert kv_cache_shape(layout, 1813, (4, 128), member=member) == expected


def test_a_state_may_be_one_number() -> None:
    layout = BlockTableLayout.plan(AttentionSpec(block_size=8), LIMITS)

    assert kv_cache_shape(layout, 1, (1, 1)) == (1, 8, 1, 1)


@pytest.mark.parametrize("bad", [pytest.param((0, 1), id="zero"), pytest.param((2.0,), id="float")])
def test_a_state_without_room_is_refused(bad: Any) -> None:
    layout = BlockTableLayout.plan(AttentionSpec(block_size=8), LIMITS)

    with pytest.raises(InvalidSpecError, match="state_shape must hold positive ints"):
        kv_cache_shape(layout, 1, bad)


def test_a_shape_needs_a_pool_and_the_member_it_is_for() -> None:
    layout = BlockTableLayout.plan(COMPRESSED, LIMITS, 64)

    with pytest.raises(InvalidSpecError, match="name the member"):
        kv_cache_shape(layout, 4, (8,))
    bad_pools: list[Any] = [0, -1, True, 2.0]
    for bad in bad_pools:
        with pytest.raises(InvalidSpecError, match="num_blocks"):
            kv_cache_shape(layout, bad, (8,), member="latent")


def test_a_cache_of_blocks_is_seen_in_kernel_blocks() -> None:
    layout = BlockTableLayout.plan(AttentionSpec(block_size=8), LIMITS, 2)
    cache = torch.arange(3 * 8 * 5).view(3, 8, 5)

    view = kernel_block_view(cache, layout)

    assert tuple(view.shape) == kv_cache_shape(layout, 3, (5,))
    assert view.data_ptr() == cache.data_ptr()
    (first, *_others) = layout.expand([2])
    assert torch.equal(view[first], cache[2, :2])


def test_a_block_may_hold_hundreds_of_states() -> None:
    limits = ServingLimits(max_model_len=1024, max_num_reqs=2, max_num_batched_tokens=8)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=512), limits, 128)

    assert kernel_block_view(torch.zeros(3, 512, 2), layout).shape == (12, 128, 2)


def test_a_cache_that_no_view_can_cut_is_refused() -> None:
    layout = BlockTableLayout.plan(AttentionSpec(block_size=8), LIMITS, 2)

    with pytest.raises(WidthMismatchError, match="8 states a block"):
        kernel_block_view(torch.zeros(3, 4, 5), layout)
    with pytest.raises(WidthMismatchError, match="without a copy"):
        kernel_block_view(torch.zeros(3, 9, 5)[:, :8], layout)


def test_blocks_that_are_not_cut_may_have_gaps() -> None:
    layout = BlockTableLayout.plan(MambaSpec(block_size=8), LIMITS)
    cache = torch.zeros(3, 9, 5)[:, :8]

    assert kernel_block_view(cache, layout) is cache


def test_padding_writes_nothing_not_even_the_last_slot() -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/43810
    and https://github.com/NVIDIA/TensorRT-LLM/pull/18673
    """
    memory = torch.full((7, 16), CANARY)
    cache = memory[1:6]
    slots = torch.tensor([3, PAD_SLOT, PAD_SLOT])

    write_states(cache, slots, torch.tensor([11, 22, 33]))

    changed = (memory != CANARY).nonzero()
    assert changed.tolist() == [[1, 3]]
    assert cache.view(-1)[3] == 11


def test_a_slot_outside_the_cache_is_refused() -> None:
    cache = torch.zeros(5, 16, 2)

    for bad in (80, -2):
        with pytest.raises(InvalidEditError, match="leave the cache"):
            write_states(cache, torch.tensor([bad]), torch.zeros(1, 2))
    with pytest.raises(WidthMismatchError):
        write_states(cache, torch.tensor([1, 2]), torch.zeros(1, 2))
    with pytest.raises(WidthMismatchError):
        write_states(cache, torch.tensor(1), torch.ones(2))
    with pytest.raises(WidthMismatchError):
        write_states(torch.zeros(5), torch.tensor([1]), torch.ones(1))
    assert not cache.any()


def test_writes_reach_caches_whose_blocks_have_gaps() -> None:
    memory = torch.full((4, 20, 2), float("nan"))
    cache = memory[:, :16]

    write_states(cache, torch.tensor([17, 63]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    assert memory[1, 1].tolist() == [1.0, 2.0]
    assert memory[3, 15].tolist() == [3.0, 4.0]
    assert int((~memory.isnan()).sum()) == 4


def test_the_last_token_of_a_state_writes_it() -> None:
    slots = torch.tensor([64, 65, 66, 67, PAD_SLOT, 71])
    positions = torch.tensor([0, 1, 2, 3, 7, 7])

    assert state_slots(slots, positions, 4).tolist() == [-1, -1, -1, 16, -1, 17]
    assert state_slots(slots, positions, 1).tolist() == slots.tolist()
