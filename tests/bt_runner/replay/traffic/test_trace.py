"""Traces become requests, line by line, and a line that is none is named by its number."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from bt_runner.errors import BadInputError
from bt_runner.replay.traffic.trace import (
    MalformedLine,
    TraceRequest,
    read_trace,
    with_hash_tokens,
)

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def _read(tmp_path: Path, text: str) -> list[TraceRequest | MalformedLine]:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    return list(read_trace(path))


def test_azure_lines_are_requests_with_a_time(tmp_path: Path) -> None:
    text = (
        AZURE_HEADER
        + "2023-11-16 18:15:46.6805900,374,44\r\n"
        + "2023-11-16 18:15:50.9951690,396,109"
    )

    first, second = _read(tmp_path, text)

    assert isinstance(first, TraceRequest)
    assert isinstance(second, TraceRequest)
    assert (first.line, first.prompt_len, first.output_len) == (2, 374, 44)
    assert second.arrival_ms - first.arrival_ms == pytest.approx(4314.579, abs=0.01)


def test_mooncake_lines_are_requests_with_hash_ids(tmp_path: Path) -> None:
    text = '{"timestamp": 27, "input_length": 600, "output_length": 3, "hash_ids": [4, 9]}\n'

    lines = _read(tmp_path, text)

    assert lines == [
        TraceRequest(line=1, prompt_len=600, output_len=3, arrival_ms=27.0, hash_ids=(4, 9))
    ]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("10,2\n20,4\n", id="bare"),
        pytest.param("prompt,output\n10,2\n20,4\n", id="with-a-header"),
        pytest.param("output,x,prompt\n2,0,10\n4,0,20\n", id="in-another-order"),
        pytest.param("10,2,12\n20,4,24\n", id="with-further-columns"),
        pytest.param('"10","2"\n"20","4"\n', id="quoted"),
        pytest.param("10.0,2\n2e1,4.0\n", id="with-a-point"),
        pytest.param("\ufeffprompt,output\n10,2\n20,4\n", id="after-a-byte-order-mark"),
        pytest.param("10,2\n\n20,4\n\n", id="with-blank-lines"),
    ],
)
def test_plain_lines_are_requests_of_two_columns(tmp_path: Path, text: str) -> None:
    lines = _read(tmp_path, text)

    assert [(r.prompt_len, r.output_len) for r in lines if isinstance(r, TraceRequest)] == [
        (10, 2),
        (20, 4),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(AZURE_HEADER + "yesterday,3,4\n", "TIMESTAMP", id="azure-time"),
        pytest.param(AZURE_HEADER + "2023-11-16 18:15:46,3\n", "2 columns", id="azure-columns"),
        pytest.param(AZURE_HEADER + "2023-11-16 18:15:46,3,x\n", "GeneratedTokens", id="azure-x"),
        pytest.param("7,8\n5,-1\n", "output tokens", id="negative"),
        pytest.param("7,8\n5,128.5\n", "output tokens", id="a-half"),
        pytest.param("7,8\n5,1000000000000000000000000000000\n", "more than a text", id="huge"),
        pytest.param("7,8\n5," + "9" * 5000 + "\n", "output tokens", id="very-long"),
        pytest.param("7,8\n0,1\n", "prompt tokens", id="zero"),
        pytest.param("7,8\n5\n", "one column", id="one-column"),
        pytest.param("7,8\n\x00\xff\n", "one column", id="binary"),
        pytest.param('{"input_length": 1, "output_length": 1}\n{"input', "JSON", id="cut-json"),
        pytest.param('{"input_length": 1, "output_length": 1}\n[]', "JSON", id="json-list"),
        pytest.param(
            '{"input_length": 1, "output_length": 1}\n{"input_length": 1}',
            "output_length",
            id="missing-key",
        ),
        pytest.param(
            '{"input_length": 1, "output_length": 1}\n{"input_length": 1, "output_length": true}',
            "output_length",
            id="bool",
        ),
        pytest.param(
            '{"input_length": 1, "output_length": 1}\n'
            '{"input_length": 1, "output_length": 1, "timestamp": NaN}',
            "timestamp",
            id="nan-time",
        ),
        pytest.param(
            '{"input_length": 1, "output_length": 1}\n'
            '{"input_length": 1, "output_length": 1, "hash_ids": [1.5]}',
            "hash_ids",
            id="hash",
        ),
    ],
)
def test_a_malformed_line_is_named_and_the_rest_is_read(
    tmp_path: Path, text: str, reason: str
) -> None:
    malformed = [line for line in _read(tmp_path, text) if isinstance(line, MalformedLine)]

    assert [line.line for line in malformed] == [2]
    assert reason in str(malformed[0])
    assert str(malformed[0]).startswith("line 2: ")


def test_a_deep_json_line_is_malformed(tmp_path: Path) -> None:
    text = '{"input_length": 1, "output_length": 1}\n' + "[" * 100_000

    assert isinstance(_read(tmp_path, text)[1], MalformedLine)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no line"):
        _read(tmp_path, "\n\n")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot read the trace"):
        list(read_trace(tmp_path / "nowhere"))


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
MIXED = (
    "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            BURST + "5,ChatGPT,472,18,490,Conversation log\n", (472, 18, 5000), id="burst"
        ),
        pytest.param(MIXED + "77,0,3,1.5,1,300,20\n", (300, 20, 1500), id="last-columns"),
        pytest.param(
            "arrived_at,num_prefill_tokens,num_decode_tokens\n12.75,128.0,64\n",
            (128, 64, 12_750),
            id="decimals",
        ),
        pytest.param(
            'TIMESTAMP,"ContextTokens","GeneratedTokens"\n2024-05-10 00:00:00+00:00,"3","4"\n',
            (3, 4, 1_715_299_200_000),
            id="azure-quoted",
        ),
        pytest.param("arrival_ms,prompt,output\n250,3,4\n", (3, 4, 250), id="milliseconds"),
        pytest.param(
            '[{"timestamp": 9, "input_length": 3, "output_length": 4}]', (3, 4, 9), id="array"
        ),
        pytest.param(
            '[\n {"timestamp": 9,\n  "input_length": 3, "output_length": 4}\n]\n',
            (3, 4, 9),
            id="printed-array",
        ),
    ],
)
def test_columns_are_found_by_their_names(
    tmp_path: Path, text: str, expected: tuple[int, int, float]
) -> None:
    """Wherever they stand; seconds in CSV and milliseconds in JSON or where the name says so."""
    (request,) = _read(tmp_path, text)

    assert isinstance(request, TraceRequest)
    assert (request.prompt_len, request.output_len, request.arrival_ms) == expected


def test_the_time_unit_can_be_told(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("arrived_at,prompt,output\n250,3,4\n")

    (request,) = read_trace(path, "ms")

    assert isinstance(request, TraceRequest)
    assert request.arrival_ms == 250


def test_a_packed_trace_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(b"10,2\n20,4\n"))

    assert [r.prompt_len for r in read_trace(path) if isinstance(r, TraceRequest)] == [10, 20]


def test_a_damaged_packed_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(b"10,2\n" * 10_000)[:60])

    with pytest.raises(BadInputError, match="cannot be read"):
        list(read_trace(path))


@pytest.mark.parametrize("header", ["a,b,total", "request_id,prompt_tokens"])
def test_a_header_that_names_no_tokens_is_refused(tmp_path: Path, header: str) -> None:
    """Rather than taking the first two columns for what they may not be."""
    with pytest.raises(BadInputError, match=f"begins with '{header.split(',')[0]}"):
        _read(tmp_path, header + "\n10,2\n")


def test_texts_name_blocks_as_numbers_do(tmp_path: Path) -> None:
    """Equal texts are equal numbers, and none is that of a number in the trace."""
    line = '{{"input_length": 1000, "output_length": 1, "hash_ids": [{}]}}\n'

    lines = _read(tmp_path, line.format('"a", "b"') + line.format('"a", 0'))

    first, second = (request.hash_ids for request in lines if isinstance(request, TraceRequest))
    assert first[0] == second[0]
    assert len({*first, *second}) == 3


def _hashed(*pairs: tuple[int, int]) -> list[TraceRequest]:
    return [
        TraceRequest(line=line, prompt_len=length, output_len=1, hash_ids=tuple(range(count)))
        for line, (length, count) in enumerate(pairs, 1)
    ]


@pytest.mark.parametrize(
    ("requests", "told", "expected"),
    [
        pytest.param(_hashed((2048, 128)), None, 16, id="one-power-of-two-fits"),
        pytest.param(_hashed((2048, 4)), None, 512, id="as-mooncake-has-it"),
        pytest.param(_hashed((100, 1)), None, 512, id="too-few-to-say"),
        pytest.param(_hashed((96, 2), (97, 3)), None, 48, id="one-number-fits"),
        pytest.param(_hashed((2048, 4)), 16, 16, id="leading-blocks-as-told"),
    ],
)
def test_hash_ids_say_how_many_tokens_they_name(
    requests: list[TraceRequest], told: int | None, expected: int
) -> None:
    """By their number, or as told."""
    assert {each.hash_tokens for each in with_hash_tokens(requests, told)} == {expected}


@pytest.mark.parametrize(
    ("requests", "told", "message"),
    [
        pytest.param(_hashed((2048, 128)), 512, "128 hash ids for 2048 tokens", id="too-many"),
        pytest.param(_hashed((4096, 2), (4096, 3)), None, "no one number fits", id="at-odds"),
        pytest.param(_hashed((600, 1)), None, "any of 600..2147483647 fits", id="any"),
    ],
)
def test_hash_ids_that_do_not_fit_are_refused(
    requests: list[TraceRequest], told: int | None, message: str
) -> None:
    """With the option that says it."""
    with pytest.raises(BadInputError, match=message) as refused:
        with_hash_tokens(requests, told)

    assert "--hash-tokens" in str(refused.value)


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    """A FIFO, and a device that never ends."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(BadInputError, match="not a regular file"):
            list(read_trace(path))
