"""An option's text is a number in its range, or is refused in words."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from bt_runner.terminal.options import count, measure, share, temperature


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (count, "1", 1),
        (count, "1_000", 1000),
        (measure, "0.5", 0.5),
        (share, "0", 0.0),
        (share, "1", 1.0),
        (temperature, "0", 0.0),
        (temperature, "1.5", 1.5),
    ],
)
def test_a_number_in_its_range_is_taken(
    kind: Callable[[str], float], text: str, value: float
) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (count, "0", "whole number of at least 1, not '0'"),
        (count, "2.5", "whole number of at least 1, not '2.5'"),
        (measure, "0", "above 0 and finite, not '0'"),
        (measure, "inf", "above 0 and finite, not 'inf'"),
        (share, "1.01", "in 0..1, not '1.01'"),
        (share, "half", "in 0..1, not 'half'"),
        (temperature, "-0.1", "at least 0 and finite, not '-0.1'"),
        (temperature, "nan", "at least 0 and finite, not 'nan'"),
    ],
)
def test_any_other_text_is_refused(kind: Callable[[str], float], text: str, words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        kind(text)
