"""Where the demo's text comes from: the user's file, or what is installed with Python."""

from __future__ import annotations

import sysconfig
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from bt_runner.terminal.prompts import read_prompt_lines

PROMPT_LENGTHS = (240, 7, 1, 700, 64, 63, 2_000, 33, 65, 129, 16, 350, 1_000, 2, 500, 128)
"""Tokens of the built-in prompts: short beside long, and on both sides of block borders."""

_MODULES = ("decimal", "difflib", "argparse", "collections", "textwrap", "heapq", "statistics")


class Prompt(NamedTuple):
    """A text to continue.

    Attributes:
        name: Where it comes from.
        token_ids: Its bytes.
    """

    name: str
    token_ids: list[int]


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file, one a line.

    Raises:
        BadInputError: The file cannot be read, or holds no prompt.
    """
    return [Prompt(f"line {line.number}", list(line.text)) for line in read_prompt_lines(path)]


def installed_prompts() -> list[Prompt]:
    """Return real text found beside the interpreter, cut to ``PROMPT_LENGTHS``."""
    sources = _sources()
    prompts = []
    for index, length in enumerate(PROMPT_LENGTHS):
        fitting = [source for source in sources if len(source.token_ids) >= length]
        source = fitting[index % len(fitting)]
        prompts.append(Prompt(source.name, source.token_ids[:length]))
    return prompts


def _sources() -> list[Prompt]:
    texts = {}
    licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    if licence.is_file():
        texts["LICENSE.txt"] = licence.read_text(encoding="utf-8")
    for name in _MODULES:
        texts[f"{name}.__doc__"] = import_module(name).__doc__ or ""
    topics = import_module("pydoc_data.topics").topics
    texts |= {f"help({name!r})": topics[name] for name in ("with", "lambda", "formatstrings")}
    return [Prompt(name, list(text.strip().encode())) for name, text in texts.items() if text]
