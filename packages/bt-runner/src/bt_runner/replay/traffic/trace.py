"""Traces of real traffic, read into requests; a line that is none is named.

Two forms, plain or packed with gzip, told apart by how they begin. JSON, one object a line or an
array of them: Mooncake's ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``.
CSV: columns are found by their header's names, Azure's and BurstGPT's among them; without a
header the first two are prompt and output tokens.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from bt_runner.errors import BadInputError
from bt_runner.files import open_file
from bt_width.errors import shown

TimeUnit: TypeAlias = Literal["s", "ms"]

MOONCAKE_HASH_TOKENS = 512
"""Tokens that a hash id of Mooncake's traces names."""

# columns by what they hold, their names in small letters and digits alone
_PROMPT = (
    "inputlength", "inputlen", "inputtokens", "numinputtokens", "contexttokens", "requesttokens",
    "numprefilltokens", "prefilltokens", "prompttokens", "numprompttokens", "promptlength",
    "promptlen", "promptsize", "prompt",
)  # fmt: skip
_OUTPUT = (
    "outputlength", "outputlen", "outputtokens", "numoutputtokens", "generatedtokens",
    "responsetokens", "numdecodetokens", "decodetokens", "completiontokens", "outputsize",
    "tokensize", "output",
)  # fmt: skip
_ARRIVAL = (
    "timestamp", "timestampms", "arrivaltimestamp", "arrivedat", "arrivaltime", "arrivaltimems",
    "arrivalms", "arrival", "time", "timems",
)  # fmt: skip
_HASHES = ("hashids", "blockhashes")

_MAX_LINE = 2**24
_MAX_ARRAY_BYTES = 2**28
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        line: Its line in the file, from 1; its place in a JSON array.
        prompt_len: Tokens it comes with.
        output_len: Tokens it gets.
        arrival_ms: When it came, in milliseconds after the trace's origin.
        hash_ids: Names of its leading blocks; requests whose ids are equal from the start
            have equal tokens there.
        hash_tokens: Tokens of such a block.
    """

    line: int
    prompt_len: int
    output_len: int
    arrival_ms: float = 0.0
    hash_ids: tuple[int, ...] = ()
    hash_tokens: int = MOONCAKE_HASH_TOKENS


@dataclass(frozen=True, slots=True)
class MalformedLine:
    """A line that is not a request.

    Attributes:
        line: Its number in the file, from 1.
        reason: What is wrong with it.
    """

    line: int
    reason: str

    def __str__(self) -> str:
        """Name the line and what is wrong with it."""
        return f"line {self.line}: {self.reason}"


Line: TypeAlias = TraceRequest | MalformedLine


def read_trace(path: Path, time_unit: TimeUnit | None = None) -> Iterator[Line]:
    """Yield the lines of a trace in order, blank ones left out.

    Args:
        path: The file.
        time_unit: Of times that are numbers; by default milliseconds in JSON and in columns
            whose name says so, and seconds in other columns.

    Raises:
        BadInputError: The file cannot be read, has no line, or names no column of tokens.
    """
    try:
        with open_file(path, what="the trace ") as file, _unpacked(file) as text:
            numbered = _numbered(text, path)
            first = next(numbered, None)
            if first is None:
                raise BadInputError(f"the trace {path} has no line", path=str(path))
            lines = chain([first], numbered)
            begin = first[1].lstrip()
            if begin.startswith("["):
                yield from _read_array(lines, path, _Reader(time_unit or "ms"))
            elif begin.startswith("{"):
                yield from _read_json_lines(lines, _Reader(time_unit or "ms"))
            else:
                yield from _read_csv(lines, path, time_unit)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInputError(f"the trace {path} cannot be read: {error}", path=str(path)) from error


def with_hash_tokens(requests: list[TraceRequest], told: int | None = None) -> list[TraceRequest]:
    """Return the requests, each told how many tokens its hash ids name.

    Args:
        requests: Those of one trace.
        told: What the user says; without it the number follows from the requests, each of
            which has as many ids as its prompt has blocks, the last one counted if it is not
            full.

    Raises:
        BadInputError: A request has more ids than blocks of ``told`` tokens, or no number of
            tokens fits all requests, or several do.
    """
    hashed = [request for request in requests if request.hash_ids]
    if not hashed:
        return requests
    tokens = _inferred_hash_tokens(hashed) if told is None else told
    for request in hashed:
        num_blocks = -(-request.prompt_len // tokens)
        if len(request.hash_ids) > num_blocks:
            raise BadInputError(
                f"line {request.line} has {len(request.hash_ids)} hash ids for "
                f"{request.prompt_len} tokens, which are {num_blocks} blocks of {tokens}: say "
                "with --hash-tokens how many tokens an id names",
                line=request.line,
                hash_tokens=tokens,
            )
    return [replace(request, hash_tokens=tokens) for request in requests]


def _inferred_hash_tokens(requests: list[TraceRequest]) -> int:
    """Return the one n with ``len(hash_ids) == ceil(prompt_len / n)`` in all requests."""
    least, most = 1, _MAX_TOKENS
    for request in requests:
        count = len(request.hash_ids)
        least = max(least, -(-request.prompt_len // count))
        if count > 1:
            most = min(most, -(-request.prompt_len // (count - 1)) - 1)
    powers = [1 << power for power in range(31) if least <= 1 << power <= most]
    if least == most:
        return int(least)
    if len(powers) == 1:
        return powers[0]
    if least <= MOONCAKE_HASH_TOKENS <= most:
        return MOONCAKE_HASH_TOKENS
    fits = f"any of {least}..{most} fits" if least <= most else "no one number fits all requests"
    raise BadInputError(
        f"how many tokens a hash id names does not follow from the trace ({fits}): say it with "
        "--hash-tokens",
        least=least,
        most=most,
    )


def _unpacked(file: BinaryIO) -> io.TextIOWrapper:
    is_packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    data = gzip.GzipFile(fileobj=file) if is_packed else file
    return io.TextIOWrapper(data, encoding="utf-8-sig", errors="replace", newline=None)


def _numbered(text: io.TextIOWrapper, path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    while line := text.readline(_MAX_LINE):
        number += 1
        if len(line) == _MAX_LINE:
            raise BadInputError(
                f"the trace {path} cannot be read: line {number} is longer than {_MAX_LINE:,} "
                "characters",
                line=number,
            )
        if line.strip():
            yield number, line


class _Reader:
    """Turns records, by their fields' names, into requests.

    It numbers hashes that are texts in the order they come.
    """

    def __init__(self, time_unit: TimeUnit) -> None:
        self._ms = 1.0 if time_unit == "ms" else 1000.0
        self._number_of_text: dict[str, int] = {}

    def request(self, number: int, record: Mapping[str, object]) -> TraceRequest:
        """Read a record; raise ``ValueError`` where it is not a request."""
        by_name = {_plain(name): (name, value) for name, value in record.items()}
        prompt = _count(by_name, _PROMPT, "input_length")
        output = _count(by_name, _OUTPUT, "output_length")
        if prompt + output > _MAX_TOKENS:
            raise ValueError(f"{shown(prompt + output)} tokens are more than a text can have")
        return TraceRequest(
            line=number,
            prompt_len=prompt,
            output_len=output,
            arrival_ms=self._arrival(by_name),
            hash_ids=self._hash_ids(by_name),
        )

    def _arrival(self, by_name: Mapping[str, tuple[str, object]]) -> float:
        name, value = _first(by_name, _ARRIVAL)
        if value is None or value == "":
            return 0.0
        if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
            try:
                moment = datetime.fromisoformat(value.strip())
            except ValueError:
                raise ValueError(f"{name} {shown(value)} is not a time") from None
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000
        number = float(value) if isinstance(value, str | int | float) else math.nan
        if isinstance(value, bool) or not 0 <= number < math.inf:
            raise ValueError(f"{name} {shown(value)} is not a time")
        return number * self._ms

    def _hash_ids(self, by_name: Mapping[str, tuple[str, object]]) -> tuple[int, ...]:
        name, value = _first(by_name, _HASHES)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(each) in (int, str) for each in value):
            raise ValueError(f"{name} {shown(value)} is not a list of numbers or texts")
        return tuple(
            # texts count down from -1, so that they meet no number
            self._number_of_text.setdefault(each, -1 - len(self._number_of_text))
            if isinstance(each, str)
            else each
            for each in value
        )


def _read_json_lines(lines: Iterable[tuple[int, str]], reader: _Reader) -> Iterator[Line]:
    for number, text in lines:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            yield MalformedLine(number, "not a JSON object")
            continue
        yield _line(reader, number, record)


def _read_array(lines: Iterable[tuple[int, str]], path: Path, reader: _Reader) -> Iterator[Line]:
    texts, size = [], 0
    for _, text in lines:
        texts.append(text)
        size += len(text)
        if size > _MAX_ARRAY_BYTES:
            raise BadInputError(
                f"the trace {path} is one JSON array of more than {_MAX_ARRAY_BYTES:,} "
                "characters: write one object a line",
                path=str(path),
            )
    try:
        records = json.loads("".join(texts))
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"the trace {path} begins like a JSON array and is none: {error!s:.200}",
            path=str(path),
        ) from None
    for number, record in enumerate(records, 1):
        yield _line(reader, number, record)


def _line(reader: _Reader, number: int, record: object) -> Line:
    if not isinstance(record, dict):
        return MalformedLine(number, "not a JSON object")
    try:
        return reader.request(number, record)
    except (ValueError, OverflowError) as error:
        return MalformedLine(number, str(error))


def _read_csv(
    lines: Iterable[tuple[int, str]], path: Path, time_unit: TimeUnit | None
) -> Iterator[Line]:
    names: list[str] | None = None
    reader = _Reader(time_unit or "s")
    for number, text in lines:
        try:
            cells = [cell.strip() for cell in next(csv.reader([text]))]
        except (csv.Error, StopIteration) as error:
            yield MalformedLine(number, str(error) or "no cell")
            continue
        if names is None:
            names = _header(cells, path)
            if names is not None:
                if time_unit is None and any(_plain(name).endswith("ms") for name in names):
                    reader = _Reader("ms")
                continue
            names = ["prompt tokens", "output tokens"]
        if len(cells) < len(names) or len(cells) < 2:
            count = "one column" if len(cells) == 1 else f"{len(cells)} columns"
            yield MalformedLine(number, f"{count}, expected {', '.join(names)}")
            continue
        yield _line(reader, number, dict(zip(names, cells, strict=False)))


def _header(cells: list[str], path: Path) -> list[str] | None:
    """Return the names of a header; None where the line is one of numbers.

    Raises:
        BadInputError: None of the names is that of a column of tokens.
    """
    if all(_NUMBER.fullmatch(cell) for cell in cells[:2]):
        return None
    plain = {_plain(cell) for cell in cells}
    for wanted, what in ((_PROMPT, "prompt"), (_OUTPUT, "output")):
        if not plain.intersection(wanted):
            raise BadInputError(
                f"the trace {path} begins with {shown(', '.join(cells))}, and no column of it is "
                f"known to hold {what} tokens; name it {wanted[0][:6].rstrip('l')}_tokens, or "
                "leave the header out",
                path=str(path),
                columns=cells[:100],
            )
    return cells


_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


def _plain(name: object) -> str:
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def _first(by_name: Mapping[str, tuple[str, object]], known: tuple[str, ...]) -> tuple[str, object]:
    return next((by_name[name] for name in known if name in by_name), (known[0], None))


def _count(
    by_name: Mapping[str, tuple[str, object]], known: tuple[str, ...], default_name: str
) -> int:
    """Return a whole number above 0, written as one or with zeros behind the point."""
    name, value = _first(by_name, known)
    number = value
    if isinstance(value, str) and _NUMBER.fullmatch(value) and len(value) <= 40:
        number = int(value) if value.isdecimal() else float(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if type(number) is not int or number < 1:
        shown_name = default_name if value is None else name
        raise ValueError(f"{shown_name} must be a positive int, not {shown(value)}")
    return number


def longest_common_beginning(requests: Iterable[TraceRequest]) -> int:
    """Return the tokens of the longest beginning that a prompt shares with an earlier one."""
    seen: dict[tuple[int, int], int] = {}
    longest = 0
    for request in requests:
        place, num_common, is_known = 0, 0, True
        for hash_id in request.hash_ids:
            # a beginning is numbered when it is first seen, after the one before it
            key = (place, hash_id)
            is_known = is_known and key in seen
            num_common += is_known
            place = seen.setdefault(key, len(seen) + 1)
        longest = max(longest, min(num_common * request.hash_tokens, request.prompt_len))
    return longest
