"""A file of prompts: one a line, empty lines left out."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bt_runner.errors import BadInputError


class PromptLine(NamedTuple):
    """A line that is no empty one.

    Attributes:
        number: Its number in the file, from 1.
        text: Its bytes.
    """

    number: int
    text: bytes


def read_prompt_lines(path: Path) -> list[PromptLine]:
    """Return the prompts of a file, at least one.

    Raises:
        BadInputError: The file cannot be read, or holds no prompt.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInputError(
            f"cannot read prompts from {path}: {error.strerror}", path=str(path)
        ) from error
    prompts = [PromptLine(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise BadInputError(f"{path} holds no prompt: write one a line", path=str(path))
    return prompts
