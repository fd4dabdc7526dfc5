"""Tokens to text as they come: nothing is lost, and no half of a character is shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.hf_models import transformers
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


def _write(directory: Path, model: dict[str, Any], **parts: Any) -> Path:
    tokenizer = {"version": "1.0", "added_tokens": [], **parts, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return directory


_LETTER = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"},
        {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None},
        {**_LETTER, "unk_token": "[UNK]"},
    ],
    ids=["word-level", "unigram", "bpe"],
)
def test_a_text_without_tokens_is_refused(tmp_path: Path, model: dict[str, Any]) -> None:
    """Where the token that would stand for what is unknown is missing, too."""
    tokenizer = load_tokenizer(_write(tmp_path, model))

    with pytest.raises(
        BadInputError, match=r"cannot turn 'z+.*' into tokens: .*[Uu]nk|UNK"
    ) as said:
        tokenizer.encode("z" * 10**6)

    assert len(str(said.value)) < 500


@pytest.mark.parametrize("name", ["[X]", "B"], ids=["special-token", "second-text"])
def test_a_template_that_names_what_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    """The library panics then, which is no ``Exception``."""
    kind = "Sequence" if name == "B" else "SpecialToken"
    parts = [{kind: {"id": name, "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": parts, "pair": [], "special_tokens": {}}
    tokenizer = load_tokenizer(_write(tmp_path, _LETTER, post_processor=template))

    with pytest.raises(BadInputError, match="cannot turn 'a' into tokens"):
        tokenizer.encode("a")


def test_a_table_that_cannot_be_parsed_is_refused(tmp_path: Path) -> None:
    """A panic while the file is read."""
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}

    with pytest.raises(BadInputError, match=r"cannot read .*tokenizer\.json: Precompiled"):
        load_tokenizer(_write(tmp_path, _LETTER, normalizer=charsmap))


def test_half_of_a_pair_is_no_text(tokenizer: TextTokenizer) -> None:
    """It is named with its place; a terminal of another encoding hands over such characters."""
    with pytest.raises(BadInputError, match=r"character 3 is '\\udcff', half of a pair"):
        tokenizer.encode("ab\udcff")


def test_a_text_is_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    """Whatever the file says: transformers leaves both out, too."""
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    filled: dict[str, Any] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
    }
    filled |= {"pad_id": 1, "pad_type_id": 0, "pad_token": "b"}
    _write(tmp_path, _LETTER, truncation=cut, padding=filled)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))

    tokens = load_tokenizer(tmp_path).encode("aaa")

    assert tokens == theirs("aaa")["input_ids"] == [0, 0, 0]
