"""One kernel block size for all backends of a group, or an error that says what would work."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bt_width import InvalidSpecError, MultipleOf, NoCommonBlockSizeError, select_kernel_block_size

pytestmark = pytest.mark.fast

Sizes = Sequence[int | MultipleOf]


@pytest.mark.parametrize(
    ("block_size", "supported", "chosen"),
    [
        pytest.param(64, [[32, 64], [64]], 64, id="one-reads-64-only"),
        pytest.param(128, [[32, 64], [64]], 64, id="a-block-of-128-is-split"),
        pytest.param(544, [[16, 32, 64]], 32, id="block-of-544"),
        pytest.param(784, [[16, 32, 64]], 16, id="block-of-784"),
        pytest.param(1056, [[16, 32, 64]], 32, id="block-of-1056"),
        pytest.param(640, [[64, 128]], 128, id="block-of-640"),
        pytest.param(4192, [[16, 32, 64]], 32, id="block-of-4192"),
        pytest.param(2112, [[16, 32, 64]], 64, id="block-of-2112"),
        pytest.param(48, [[16, 32, 64]], 16, id="block-of-48"),
        pytest.param(528, [[16, 32, 64]], 16, id="block-of-528"),
        pytest.param(544, [[MultipleOf(16)]], 544, id="a-multiple-of-16-is-not-split"),
        pytest.param(544, [[MultipleOf(16)], [16, 32]], 32, id="a-list-bounds-the-multiples"),
        pytest.param(96, [[48, MultipleOf(64)], [MultipleOf(16)]], 48, id="mixed"),
        pytest.param(64, [[64, 32], [32]], 32, id="the-order-of-a-list-does-not-matter"),
        pytest.param(64, [(16,), (16, 32)], 16, id="tuples"),
        pytest.param(1, [[1, 16]], 1, id="block-of-one"),
        pytest.param(64, {"mla": [32, 64], "indexer": [64]}, 64, id="by-name"),
    ],
)
def test_the_size_that_suits_all(block_size: int, supported: Any, chosen: int) -> None:
    assert select_kernel_block_size(block_size, supported) == chosen


def test_a_block_that_every_backend_takes_is_not_split() -> None:
    """Even where a smaller size is listed first."""
    assert select_kernel_block_size(256, [[16, MultipleOf(64)], [16, 256]]) == 256


@pytest.mark.parametrize("block_size", [1, 8, 15])
def test_a_block_smaller_than_every_kernel_block(block_size: int) -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/48286
    and https://github.com/vllm-project/vllm/pull/49845
    and https://github.com/vllm-project/vllm/issues/42510
    and https://github.com/vllm-project/vllm/issues/41339
    """
    with pytest.raises(NoCommonBlockSizeError, match="16") as caught:
        select_kernel_block_size(block_size, [[MultipleOf(16)]])

    assert caught.value.details["nearest"] == 16


def test_the_error_names_each_backend_its_list_and_what_would_work() -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/48286
    and https://github.com/vllm-project/vllm/pull/49845
    and https://github.com/vllm-project/vllm/issues/42510
    and https://github.com/vllm-project/vllm/issues/41339
    """
    with pytest.raises(NoCommonBlockSizeError) as caught:
        select_kernel_block_size(16, {"FlashMLA": [64], "DeepGEMM": [32, 64]})

    message = str(caught.value)
    for words in ("16", "FlashMLA takes 64", "DeepGEMM takes 32, 64", "nearest"):
        assert words in message
    assert caught.value.details["nearest"] == 64


def test_backends_without_a_name_are_numbered() -> None:
    with pytest.raises(NoCommonBlockSizeError) as caught:
        select_kernel_block_size(16, [[64], [MultipleOf(48)]])

    message = str(caught.value)
    for words in ("backend 0 takes 64", "backend 1 takes multiples of 48"):
        assert words in message


def test_where_nothing_would_work_the_error_says_so() -> None:
    with pytest.raises(NoCommonBlockSizeError, match="no block size suits them all") as caught:
        select_kernel_block_size(100, [[64], [48]])

    assert caught.value.details["nearest"] is None


def test_the_nearest_may_lie_below() -> None:
    """A block of 70 tokens is nearer to 64 than to 128."""
    with pytest.raises(NoCommonBlockSizeError) as caught:
        select_kernel_block_size(70, [[64], [32, 64]])

    assert caught.value.details["nearest"] == 64


def test_the_nearest_counts_multiples_of_what_all_take() -> None:
    """Sizes of 16 and of 24 meet at 48 and its multiples."""
    with pytest.raises(NoCommonBlockSizeError) as caught:
        select_kernel_block_size(100, [[MultipleOf(16)], [MultipleOf(24)]])

    assert caught.value.details["nearest"] == 96


NUMBERS = [1, 2, 3, 4, 6, 8, 12]
ENTRIES = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS).map(MultipleOf))
BACKENDS = st.lists(st.lists(ENTRIES, min_size=1, max_size=3), min_size=1, max_size=3)


def _takes(sizes: Sizes, size: int) -> bool:
    return any(
        size % entry.n == 0 if isinstance(entry, MultipleOf) else size == entry for entry in sizes
    )


def _largest_legal(block_size: int, supported: Sequence[Sizes]) -> int | None:
    """The largest of all divisors that all take: nothing is known of lists here."""
    legal = [
        size
        for size in range(1, block_size + 1)
        if block_size % size == 0 and all(_takes(sizes, size) for sizes in supported)
    ]
    return max(legal, default=None)


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(block_size=st.integers(1, 60), supported=BACKENDS)
def test_a_legal_size_is_found_wherever_there_is_one(
    block_size: int, supported: list[list[int | MultipleOf]]
) -> None:
    """Complete: against a walk over every divisor of the block and of its neighbours."""
    expected = _largest_legal(block_size, supported)

    if expected is not None:
        assert select_kernel_block_size(block_size, supported) == expected
        return
    with pytest.raises(NoCommonBlockSizeError) as caught:
        select_kernel_block_size(block_size, supported)
    far = block_size + 2 * math.lcm(*NUMBERS)
    distances = [abs(n - block_size) for n in range(1, far) if _largest_legal(n, supported)]
    nearest = caught.value.details["nearest"]
    if distances:
        assert isinstance(nearest, int)
        assert _largest_legal(nearest, supported)
        assert abs(nearest - block_size) == min(distances)
    else:
        assert nearest is None


@pytest.mark.parametrize(
    "sizes", list(itertools.combinations([1, 2, 3, MultipleOf(2), MultipleOf(3)], 2)), ids=repr
)
def test_every_small_pair_of_lists(sizes: tuple[int | MultipleOf, ...]) -> None:
    supported = [[size] for size in sizes]
    for block_size in range(1, 37):
        expected = _largest_legal(block_size, supported)
        try:
            found: int | None = select_kernel_block_size(block_size, supported)
        except NoCommonBlockSizeError:
            found = None

        assert found == expected


# What is refused.


@pytest.mark.parametrize("bad", [0, -1, True, 16.0, "16", None], ids=repr)
def test_multiples_are_of_a_positive_int(bad: Any) -> None:
    with pytest.raises(InvalidSpecError):
        MultipleOf(bad)


def test_multiples_are_a_value() -> None:
    multiple: Any = MultipleOf(16)

    assert {multiple: "first"}[MultipleOf(16)] == "first"
    assert MultipleOf(16) != MultipleOf(32)
    assert not hasattr(multiple, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        multiple.n = 32


@pytest.mark.parametrize("bad", [0, -1, True, 16.0, "16", None], ids=repr)
def test_a_block_size_is_a_positive_int(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="block_size"):
        select_kernel_block_size(bad, [[16]])


@pytest.mark.parametrize("bad", [0, -1, True, 16.0, "16", None, [16]], ids=repr)
def test_a_listed_size_is_a_positive_int(bad: Any) -> None:
    """Refused although another size of the same list would do."""
    with pytest.raises(InvalidSpecError, match="FlashMLA"):
        select_kernel_block_size(16, {"FlashMLA": [16, bad]})


@pytest.mark.parametrize("bad", [None, 16, [16], ["16"], "16", {"FlashMLA": 16}], ids=repr)
def test_sizes_come_as_one_list_per_backend(bad: Any) -> None:
    with pytest.raises(InvalidSpecError):
        select_kernel_block_size(16, bad)


def test_a_backend_that_lists_nothing_is_refused_by_name() -> None:
    with pytest.raises(InvalidSpecError, match="FlashMLA"):
        select_kernel_block_size(16, {"FlashMLA": [], "DeepGEMM": [64]})


@pytest.mark.parametrize("bad", [{1: [16]}, {None: [16]}], ids=repr)
def test_a_backends_name_is_a_string(bad: Any) -> None:
    with pytest.raises(InvalidSpecError):
        select_kernel_block_size(16, bad)
