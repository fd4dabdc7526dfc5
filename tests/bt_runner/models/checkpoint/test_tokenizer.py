"""Tokens to text as they come: nothing is lost, and no half of a character is shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.tokenizers import write_byte_tokenizer

from bt_runner.errors import BadInputError
from bt_runner.models.checkpoint import TextTokenizer, load_tokenizer

TEXT = "Grüße, 世界! 🙂 twice: 🙂🙂"


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    """Return a tokenizer of bytes, so that most characters take several tokens."""
    write_byte_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def test_text_comes_back(tokenizer: TextTokenizer) -> None:
    """Encoding and decoding are each other's inverse."""
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_stream_gives_whole_characters(tokenizer: TextTokenizer) -> None:
    """Put together the pieces are the text, and none holds a broken character."""
    stream = tokenizer.stream()

    pieces = [stream.push(token) for token in tokenizer.encode(TEXT)]

    assert "".join(pieces) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert pieces.count("") > 10


def test_flush_shows_what_will_never_be_complete(tokenizer: TextTokenizer) -> None:
    """A text that ends within a character shows that it does."""
    stream = tokenizer.stream()
    tokens = tokenizer.encode("a🙂")[:-1]

    assert [stream.push(token) for token in tokens] == ["a", "", "", ""]
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.flush() == ""


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    """A directory without one is named."""
    with pytest.raises(BadInputError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_broken_tokenizer_is_named(tmp_path: Path) -> None:
    """A file that is no tokenizer is named."""
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")

    with pytest.raises(BadInputError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tokenizers the error says what to install."""
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(BadInputError, match=r"pip install 'bt-runner\[hf\]'"):
        load_tokenizer(tmp_path)
