"""What an option's text may be: a count, a measure, a share or a temperature."""

from __future__ import annotations

import argparse
import math

from bt_width.errors import shown

_MAX_DIGITS = 40


def count(text: str) -> int:
    """Return a whole number of at least 1, or refuse the text."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {shown(text)}")
    return value


def seed(text: str) -> int:
    """Return a whole number of at least 0, or refuse the text."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {shown(text)}")
    return int(text)


def measure(text: str) -> float:
    """Return a finite number above 0, or refuse the text."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, not {shown(text)}")
    return value


def share(text: str) -> float:
    """Return a number from 0 to 1, or refuse the text."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must lie in 0..1, not {shown(text)}")
    return value


def temperature(text: str) -> float:
    """Return a finite number of at least 0, or refuse the text."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0 and finite, not {shown(text)}")
    return value


def _number(text: str) -> float:
    """Return the number, or NaN, which lies in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan
