"""A broken or hostile config ends in one error, in bounded time and memory."""

import json
import os
import time
import tracemalloc
from pathlib import Path

import pytest
from tests.support.speed import slowness

from bt_width import InvalidSpecError
from bt_width.plan.config_file import MAX_CONFIG_BYTES, parse_config, read_config

pytestmark = pytest.mark.fast


def test_a_config_is_read_from_its_file_or_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"model_type": "llama"}).encode())

    assert read_config(path) == read_config(tmp_path) == {"model_type": "llama"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(b"", "not JSON", id="empty"),
        pytest.param(b"{", "not JSON", id="cut"),
        pytest.param(b"\xff\xfe{}", "not JSON", id="not-utf-8"),
        pytest.param(b"[]", "JSON object", id="list"),
        pytest.param(b"[" * 100_000, "nested", id="nested"),
        pytest.param(b'{"a":' * 100_000, "nested", id="nested-objects"),
        pytest.param(b'{"a": {"b": 1, "c": 2, "b": 3}}', "'b' occurs twice", id="duplicate"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", "not JSON", id="digits"),
    ],
)
def test_what_is_no_config_is_refused(text: bytes, words: str) -> None:
    with pytest.raises(InvalidSpecError, match=words) as caught:
        parse_config(text, "config.json")

    assert len(str(caught.value)) < 300


def test_a_key_that_stands_twice_is_found_among_many() -> None:
    text = b"{" + b",".join(b'"k%d": 1' % n for n in range(50_000)) + b', "k7": 2}'
    started = time.process_time()

    with pytest.raises(InvalidSpecError, match="'k7'"):
        parse_config(text, "config.json")
    assert time.process_time() - started < 5 * slowness()


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**36)
    tracemalloc.start()

    with pytest.raises(InvalidSpecError, match="larger"):
        read_config(path)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * MAX_CONFIG_BYTES


@pytest.mark.parametrize("path", ["/dev/zero", "nowhere.json", "a\0b", "x" * 5000], ids=ascii)
def test_what_cannot_be_read_is_refused(path: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        read_config(Path(path))

    assert len(str(caught.value)) < 300


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)

    with pytest.raises(InvalidSpecError, match="regular file"):
        read_config(path)
