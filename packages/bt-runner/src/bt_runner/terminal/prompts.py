"""A file of prompts: one a line, empty lines left out."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bt_runner.errors import BadInputError
from bt_runner.files import read_file

MAX_PROMPT_BYTES = 2**26
"""The largest file of prompts that is read."""

MAX_LINE_BYTES = 2**22
"""The longest prompt: more text than any model's context, and to tokenize it takes a gigabyte."""


class PromptLine(NamedTuple):
    """A line that is not empty.

    Attributes:
        number: Its number in the file, from 1.
        text: Its bytes.
    """

    number: int
    text: bytes


def read_prompt_lines(path: Path) -> list[PromptLine]:
    """Return the prompts of a file, at least one.

    Raises:
        BadInputError: The file cannot be read, is too large or holds no prompt, or a line is
            too long.
    """
    lines = read_file(path, max_bytes=MAX_PROMPT_BYTES, what="prompts from ").splitlines()
    prompts = [PromptLine(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for number, line in prompts:
        if len(line) > MAX_LINE_BYTES:
            raise BadInputError(
                f"line {number} of {path} has {len(line):,} bytes, and a prompt at most "
                f"{MAX_LINE_BYTES:,}",
                path=str(path),
                line=number,
                num_bytes=len(line),
            )
    if not prompts:
        raise BadInputError(f"{path} holds no prompt: write one a line", path=str(path))
    return prompts
