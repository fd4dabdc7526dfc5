"""Block ids become kernel-block ids once, for every reader of the group."""

from typing import Any

import pytest
from tests.support.plans import plan

from bt_width import (
    NULL_BLOCK,
    AttentionSpec,
    InvalidEditError,
    InvalidSpecError,
    RowOverflowError,
)

pytestmark = pytest.mark.fast


def test_a_block_becomes_its_kernel_blocks() -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/42846
    and https://github.com/vllm-project/vllm/pull/42766
    and https://github.com/vllm-project/vllm/pull/28677
    """
    layout = plan(AttentionSpec(block_size=128), 256, kernel_block_size=64)

    assert list(layout.expand([7, 3])) == [14, 15, 6, 7]


def test_an_unsplit_block_is_its_kernel_block() -> None:
    assert list(plan(AttentionSpec(block_size=64), 256).expand([7, 3])) == [7, 3]


def test_the_null_block_stays_null() -> None:
    """Kernel blocks 1..k-1 would be a live block's to a kernel, and belong to no block."""
    layout = plan(AttentionSpec(block_size=64), 256, kernel_block_size=16)

    assert list(layout.expand([NULL_BLOCK, 2, NULL_BLOCK])) == [0] * 4 + [8, 9, 10, 11] + [0] * 4


def test_no_blocks_expand_to_none() -> None:
    assert list(plan(AttentionSpec(block_size=64), 256).expand([])) == []


@pytest.mark.parametrize("bad", [True, 1.0, "1", None, [1]], ids=repr)
def test_a_block_id_is_an_int(bad: Any) -> None:
    with pytest.raises(InvalidSpecError):
        plan(AttentionSpec(block_size=64), 256).expand([3, bad])


def test_a_block_id_is_not_negative() -> None:
    with pytest.raises(InvalidEditError, match="-1"):
        plan(AttentionSpec(block_size=64), 256).expand([3, -1])


@pytest.mark.parametrize("bad", [None, 5], ids=repr)
def test_block_ids_are_a_sequence(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="block_ids"):
        plan(AttentionSpec(block_size=64), 256).expand(bad)


def test_a_row_expands_up_to_its_width() -> None:
    """The alignment's columns included: three blocks are planned as four."""
    layout = plan(AttentionSpec(block_size=32), 96, kernel_block_size=16)

    assert len(layout.expand([7] * 4)) == layout.width == 8
    with pytest.raises(RowOverflowError, match=r"5 blocks.* 4 of a row"):
        layout.expand([7] * 5)


def test_kernel_block_ids_stay_int32() -> None:
    layout = plan(AttentionSpec(block_size=64), 256, kernel_block_size=16)

    assert layout.max_block_id == 2**29 - 1
    assert type(layout.max_block_id) is int
    assert list(layout.expand([2**29 - 1]))[-1] == 2**31 - 1
    with pytest.raises(InvalidEditError, match=str(2**29)):
        layout.expand([2**29])


def test_unsplit_ids_stay_int32() -> None:
    layout = plan(AttentionSpec(block_size=64), 256)

    assert layout.expand([2**31 - 1]) == [2**31 - 1]
    with pytest.raises(InvalidEditError, match=str(2**31)):
        layout.expand([2**31])
