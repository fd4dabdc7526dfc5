"""Sizes as people write them."""

from argparse import ArgumentTypeError

import pytest

from bt_width.plan.sizes import parse_bytes, parse_length, parse_tokens, show_bytes

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1", 1),
        ("131072", 131_072),
        ("128k", 128_000),
        ("128K", 131_072),
        ("1m", 1_000_000),
        ("1M", 1_048_576),
        ("1.5K", 1536),
        (" 2K ", 2048),
    ],
)
def test_tokens(text: str, tokens: int) -> None:
    """A small letter counts in thousands, a capital in 1,024s, as vLLM reads them."""
    assert parse_tokens(text) == parse_length(text) == tokens


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("85899345920", 80 * 2**30),
        ("80GiB", 80 * 2**30),
        ("80 GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("512MiB", 2**29),
        ("3KB", 3000),
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "many", "-1", "0", "1.5", "1e9", "80G", "80gib", "1_000", "9" * 100, "0x10", "auto", "٣"],
    ids=ascii,
)
def test_what_is_no_size_is_refused_in_its_words(text: str) -> None:
    for parse in (parse_tokens, parse_bytes):
        with pytest.raises(ArgumentTypeError, match=r"is not a"):
            parse(text)


def test_a_length_may_be_left_to_the_memory() -> None:
    assert parse_length("auto") == "auto"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (80 * 2**30, "80.00 GiB")],
)
def test_bytes_are_shown_in_the_unit_that_they_fill(count: int, text: str) -> None:
    assert show_bytes(count) == text
