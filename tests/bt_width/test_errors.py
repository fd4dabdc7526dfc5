"""Every error of the project has one base, and carries its numbers."""

import pickle

import pytest

from bt_width import (
    BlockTableError,
    InvalidEditError,
    InvalidSpecError,
    NoCommonBlockSizeError,
    RowOverflowError,
    WidthMismatchError,
)

pytestmark = pytest.mark.fast

KINDS = [
    InvalidSpecError,
    NoCommonBlockSizeError,
    RowOverflowError,
    WidthMismatchError,
    InvalidEditError,
]


def test_the_base_is_a_value_error() -> None:
    assert issubclass(BlockTableError, ValueError)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_stands_directly_under_the_base(kind: type[BlockTableError]) -> None:
    """Catching one kind never catches another."""
    assert kind.__bases__ == (BlockTableError,)


@pytest.mark.parametrize("kind", [BlockTableError, *KINDS])
def test_an_error_carries_its_words_and_its_numbers(kind: type[BlockTableError]) -> None:
    error = kind("17 blocks do not fit; plan a longer row", num_blocks=17, width=16)

    assert str(error) == "17 blocks do not fit; plan a longer row"
    assert error.facts == {"num_blocks": 17, "width": 16}


def test_an_error_keeps_its_numbers_across_processes() -> None:
    """A worker's error reaches the process that reports it by pickle."""
    error = RowOverflowError("too long", num_blocks=17)

    twin = pickle.loads(pickle.dumps(error))

    assert type(twin) is RowOverflowError
    assert (str(twin), twin.facts) == ("too long", {"num_blocks": 17})
