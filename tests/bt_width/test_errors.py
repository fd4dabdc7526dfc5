"""Every error of the project has one base, and carries its numbers."""

import pickle
from typing import Any

import pytest

from bt_width import (
    AttentionSpec,
    BlockTableError,
    InvalidEditError,
    InvalidSpecError,
    NoCommonBlockSizeError,
    RowOverflowError,
    WidthMismatchError,
)
from bt_width.errors import counted

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
    assert error.details == {"num_blocks": 17, "width": 16}


class OddlyMadeError(BlockTableError):
    """An error of another package, whose constructor takes no message."""

    def __init__(self, count: int, *, row: int) -> None:
        """Keep what a program asks for besides the message."""
        super().__init__(f"{count} of row {row}", count=count)
        self.row = row


@pytest.mark.parametrize(
    "error",
    [
        *(kind("too long", num_blocks=17, names=("a", "b")) for kind in [BlockTableError, *KINDS]),
        OddlyMadeError(3, row=4),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_text_and_attributes_across_processes(error: BlockTableError) -> None:
    """A worker's error reaches the process that reports it by pickle."""
    received = pickle.loads(pickle.dumps(error))

    assert type(received) is type(error)
    assert str(received) == str(error)
    assert vars(received) == vars(error)


def test_an_error_about_what_cannot_be_pickled_is_still_sent() -> None:
    """The value of a wrong argument may be anything; its text goes in its place."""
    error = InvalidSpecError("not an int", value=lambda: 3, argument="block_size")

    received = pickle.loads(pickle.dumps(error))

    assert str(received) == "not an int"
    assert received.details["argument"] == "block_size"
    assert "function" in received.details["value"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 blocks"), (1, "1 block"), (2, "2 blocks"), (1_234, "1234 blocks")]
)
def test_a_count_agrees_with_its_noun(count: int, text: str) -> None:
    assert counted(count, "block") == text


def test_a_large_count_may_have_commas() -> None:
    assert counted(1_234_567, "byte", mark=",") == "1,234,567 bytes"


class Unprintable:
    """Its repr fails."""

    def __repr__(self) -> str:
        """Fail."""
        raise RuntimeError


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6,
        [7] * 10**6,
        {n: n for n in range(10**5)},
        10**5000,
        [[[[[[1]]]]]],
        Unprintable(),
    ],
    ids=["text", "list", "dict", "digits", "nested", "unprintable"],
)
def test_a_message_shows_a_value_of_any_size_in_a_line(value: Any) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        AttentionSpec(block_size=value)

    assert len(str(caught.value)) < 200
    assert "block_size" in str(caught.value)
