"""Sizes as people write and read them: ``128k`` tokens, ``80GiB`` of memory."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from typing import Literal

_TOKEN_UNITS = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
_BYTE_UNITS = {
    "": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))? ?([A-Za-z]*)", re.ASCII)


def parse_tokens(text: str) -> int:
    """Return a number of tokens: ``131072``, ``128K`` (times 1,024) or ``128k`` (times 1,000)."""
    return _parse(text, _TOKEN_UNITS, "tokens, such as 131072, 128k, 128K or 1M")


def parse_length(text: str) -> int | Literal["auto"]:
    """Return a number of tokens, or ``"auto"``."""
    return "auto" if text == "auto" else parse_tokens(text)


def parse_bytes(text: str) -> int:
    """Return a number of bytes: ``80GiB`` (times 1,024 thrice), ``80GB``, or bytes alone."""
    return _parse(text, _BYTE_UNITS, "bytes, such as 80GiB, 80GB or 85899345920")


def show_bytes(count: int) -> str:
    """Return a number of bytes in the largest binary unit that it fills."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count} bytes"


def _parse(text: str, units: dict[str, int], wanted: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[3] not in units:
        raise ArgumentTypeError(f"{text[:40]!r} is not a number of {wanted}")
    unit = units[match[3]]
    size = int(match[1]) * unit
    if match[2]:
        part, rest = divmod(int(match[2]) * unit, 10 ** len(match[2]))
        if rest and unit == 1:
            raise ArgumentTypeError(f"{text[:40]!r} is not a whole number of {wanted}")
        size += part
    if size < 1:
        raise ArgumentTypeError(f"{text[:40]!r} is not a positive number of {wanted}")
    return size
