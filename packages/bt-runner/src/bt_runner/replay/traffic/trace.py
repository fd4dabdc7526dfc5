"""Traces of real traffic, read line by line into requests; a line that is none is named.

Three forms, told apart by their first line: Azure's CSV (TIMESTAMP, ContextTokens,
GeneratedTokens), Mooncake's JSON lines (timestamp, input_length, output_length,
hash_ids), and a plain CSV whose first two columns are prompt and output tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Protocol

from bt_runner.errors import BadInputError

_AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        line: Its line in the file, from 1.
        prompt_len: Tokens it comes with.
        output_len: Tokens it gets.
        arrival_ms: When it came, in milliseconds after the trace's origin.
        hash_ids: Names of its leading blocks of 512 tokens; requests whose ids are
            equal from the start have equal tokens there.
    """

    line: int
    prompt_len: int
    output_len: int
    arrival_ms: float = 0.0
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MalformedLine:
    """A line that is no request.

    Attributes:
        line: Its number in the file, from 1.
        reason: What is wrong with it.
    """

    line: int
    reason: str

    def __str__(self) -> str:
        """Name the line and what is wrong with it."""
        return f"line {self.line}: {self.reason}"


class _LineReader(Protocol):
    def __call__(self, number: int, text: str) -> TraceRequest:
        """Read a line; raise ``ValueError`` where it is no request."""


def read_trace(path: Path) -> Iterator[TraceRequest | MalformedLine]:
    """Yield the lines of a trace in order, blank ones left out.

    Raises:
        BadInputError: The file cannot be read, or has no line.
    """
    try:
        with path.open(encoding="utf-8", errors="replace", newline=None) as file:
            numbered = ((n, text.strip()) for n, text in enumerate(file, start=1) if text.strip())
            first = next(numbered, None)
            if first is None:
                raise BadInputError(f"the trace {path} has no line", path=str(path))
            read_line, is_header = _form_of(first[1])
            yield from _read_lines(read_line, numbered if is_header else chain([first], numbered))
    except OSError as error:
        raise BadInputError(
            f"the trace {path} cannot be read: {error.strerror}", path=str(path)
        ) from error


def _read_lines(
    read_line: _LineReader, numbered: Iterable[tuple[int, str]]
) -> Iterator[TraceRequest | MalformedLine]:
    for number, text in numbered:
        try:
            yield read_line(number, text)
        except (ValueError, OverflowError, RecursionError) as error:
            yield MalformedLine(number, str(error))


def _form_of(first_line: str) -> tuple[_LineReader, bool]:
    """Return the reader of a trace, and whether its first line is a header."""
    if first_line.startswith("{"):
        return _read_mooncake, False
    cells = _cells(first_line)
    if cells == _AZURE_HEADER:
        return _read_azure, True
    return _read_plain, not cells[0].isdecimal()


def _read_azure(number: int, text: str) -> TraceRequest:
    cells = _cells(text)
    if len(cells) != len(_AZURE_HEADER):
        raise ValueError(f"{len(cells)} columns, expected {', '.join(_AZURE_HEADER)}")
    try:
        arrival = datetime.fromisoformat(cells[0]).timestamp()
    except ValueError:
        raise ValueError(f"TIMESTAMP {cells[0]!r} is no time") from None
    return TraceRequest(
        line=number,
        prompt_len=_count("ContextTokens", cells[1]),
        output_len=_count("GeneratedTokens", cells[2]),
        arrival_ms=arrival * 1000,
    )


def _read_mooncake(number: int, text: str) -> TraceRequest:
    try:
        record = json.loads(text)
    except ValueError:
        raise ValueError("not a JSON object") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    arrival = record.get("timestamp", 0)
    hash_ids = record.get("hash_ids", [])
    if type(arrival) not in (int, float) or not 0 <= arrival < math.inf:
        raise ValueError(f"timestamp {arrival!r} is no count of milliseconds")
    if not isinstance(hash_ids, list) or not all(type(name) is int for name in hash_ids):
        raise ValueError(f"hash_ids {hash_ids!r:.60} is no list of ints")
    return TraceRequest(
        line=number,
        prompt_len=_count("input_length", record.get("input_length")),
        output_len=_count("output_length", record.get("output_length")),
        arrival_ms=float(arrival),
        hash_ids=tuple(hash_ids),
    )


def _read_plain(number: int, text: str) -> TraceRequest:
    cells = _cells(text)
    if len(cells) < 2:
        raise ValueError("one column, expected prompt tokens and output tokens")
    return TraceRequest(
        line=number,
        prompt_len=_count("prompt tokens", cells[0]),
        output_len=_count("output tokens", cells[1]),
    )


def _cells(text: str) -> list[str]:
    return [cell.strip() for cell in text.lstrip("\ufeff").split(",")]


def _count(name: str, value: object) -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a positive int, not {value!r:.60}")
    return value
