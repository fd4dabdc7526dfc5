"""A checkpoint's ``tokenizer.json``: text to tokens, and tokens to text as they come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bt_runner.errors import BadInputError
from bt_runner.files import open_file
from bt_width.errors import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextTokenizer:
    """Text to tokens and back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Keep the tokenizer."""
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with what the tokenizer adds at its start.

        Raises:
            BadInputError: The text is not Unicode, or the tokenizer has no token for a part
                of it and none that stands for what is unknown.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            place = error.start
            raise BadInputError(
                f"the text is not valid Unicode: character {place + 1} is {text[place]!a}, "
                "half of a pair; is it encoded as the terminal says?",
                position=place,
            ) from error
        with _refused(f"the tokenizer cannot turn {shown(text)} into tokens"):
            return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        with _refused(f"the tokenizer cannot turn tokens {shown(token_ids)} into text"):
            return str(self._tokenizer.decode(token_ids))

    def stream(self) -> TextStream:
        """Return a decoder for the tokens of one text."""
        return TextStream(self)


class TextStream:
    """Turns tokens into text one by one, and holds back characters that are not complete yet."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Start with no tokens."""
        self._tokenizer = tokenizer
        # the tokens since the last text but one: some tokenizers join a token to the one before
        self._context: list[int] = []
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the text that one more token completes."""
        self._waiting.append(token_id)
        text = self._new_text()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self._context, self._waiting = self._waiting, []
        return text

    def flush(self) -> str:
        """Return what was held back, complete or not."""
        text = self._new_text()
        self._context, self._waiting = self._waiting, []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._waiting)[len(before) :]


def load_tokenizer(directory: Path) -> TextTokenizer:
    """Return the tokenizer of a checkpoint.

    Raises:
        BadInputError: There is no ``tokenizer.json``, it is broken, or the extra is not installed.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise BadInputError(f"{directory} has no tokenizer.json", path=str(path))
    open_file(path).close()
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise BadInputError(
            "text is turned into tokens with tokenizers; install it with "
            "`pip install 'bt-runner[hf]'`"
        ) from error
    with _refused(f"cannot read {path}"):
        tokenizer = Tokenizer.from_file(str(path))
    # a text to continue is neither cut nor filled up, whatever was stored for training
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextTokenizer(tokenizer)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Turn what tokenizers raises into an error of one line; a panic of it is no ``Exception``."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = (str(error).splitlines() or ["it gives no reason"])[0]
        raise BadInputError(f"{what}: {reason:.300}") from error
