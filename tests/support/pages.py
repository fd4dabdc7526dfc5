"""Markdown pages as programs: their code is run, and what they show is what it prints.

A ``python`` block runs after those above it, with their names. The next block after one
that prints is ``text`` and shows what it printed. A ``console`` block shows commands
after ``$`` and, below each, all that it prints. A ``text`` block elsewhere is a drawing; a
block that names no language is text.
"""

import contextlib
import io
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.support.source_trees import ROOT

# the commands as their modules, so that they need not be installed
SCRIPTS = "".join(
    f'{name}() {{ "{sys.executable}" -m {name.replace("-", "_")} "$@"; }}\n'
    for name in ("bt-width", "bt-runner")
)
COMMAND = re.compile(r"((?:.*\\\n)*.*)\n")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, its text, the line it begins on."""

    language: str
    text: str
    line: int


END_OF_PAGE = Block("end", "", 0)


class Difference(NamedTuple):
    """Code of a page that prints something else than the page shows."""

    line: int
    shown: str
    printed: str


def read_blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(match[1] or "text", match[2], page.count("\n", 0, match.start()) + 1)
        for match in FENCE.finditer(page)
    ]


def run_page(page: str, folder: Path = ROOT) -> list[Difference]:
    """Run a page, its commands in a folder; return where it shows another thing than it prints."""
    names: dict[str, object] = {"__name__": "page"}
    differences = []
    for block, following in pairwise([*read_blocks(page), END_OF_PAGE]):
        if block.language == "console":
            differences += _run_commands(block, folder)
        elif block.language == "python":
            printed = _run_python(block, names)
            shown = following.text if following.language == "text" else ""
            if printed and printed != shown:
                differences.append(Difference(block.line, shown, printed))
    return differences


def as_program(page: str) -> tuple[str, str]:
    """A page's Python as one program, and the texts below its blocks: what it shall print."""
    blocks = read_blocks(page)
    program = [block.text for block in blocks if block.language == "python"]
    shown = [
        following.text
        for block, following in pairwise(blocks)
        if (block.language, following.language) == ("python", "text")
    ]
    return "".join(program), "".join(shown)


def _run_python(block: Block, names: dict[str, object]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        # the newlines make a traceback name the page's own line
        exec(compile("\n" * block.line + block.text, "<page>", "exec"), names)
    return out.getvalue()


def _run_commands(block: Block, folder: Path) -> list[Difference]:
    differences = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command = COMMAND.match(part)
        assert command, part
        done = subprocess.run(
            ["bash", "-c", SCRIPTS + command[1]],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        shown = part[command.end() :]
        if done.stdout != shown:
            differences.append(Difference(block.line, shown, done.stdout))
    return differences
