"""Traces become requests, line by line, and a line that is none is named by its number."""

from __future__ import annotations

from pathlib import Path

import pytest

from bt_runner.errors import BadInputError
from bt_runner.replay.traffic.trace import MalformedLine, TraceRequest, read_trace

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
        pytest.param("a,b,total\n10,2,12\n20,4,24\n", id="with-further-columns"),
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
            '{"input_length": 1, "output_length": 1, "hash_ids": ["a"]}',
            "hash_ids",
            id="text-hash",
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
    with pytest.raises(BadInputError, match="cannot be read"):
        list(read_trace(tmp_path / "nowhere"))
