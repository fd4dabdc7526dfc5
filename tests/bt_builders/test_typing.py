"""A builder whose flag and constructor disagree is refused by the type checker."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

TYPING = Path(__file__).parent / "typing"
ROOT = Path(__file__).parents[2]
MARK = re.compile(r"# refused: (.+)$")
ANSWER = re.compile(r"refused\.py:(\d+): error: .*\[([a-z-]+)\]$", re.MULTILINE)


@pytest.fixture(scope="module")
def answer() -> str:
    """What mypy says of both files, with the tree's own configuration and cache."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(TYPING / "accepted.py"), str(TYPING / "refused.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_builders_of_ones_own_are_accepted(answer: str) -> None:
    assert "accepted.py" not in answer


def test_four_wrong_builders_are_refused_line_by_line(answer: str) -> None:
    lines = (TYPING / "refused.py").read_text(encoding="utf-8").splitlines()
    marks = [(n, mark[1]) for n, line in enumerate(lines, 1) if (mark := MARK.search(line))]
    found = [(int(match[1]), match[2]) for match in ANSWER.finditer(answer)]

    assert len(marks) == 5
    assert found == marks


def test_a_flag_without_its_literal_is_told_so(answer: str) -> None:
    """The message that ``docs/write-a-builder.md`` shows."""
    message = 'requires_block_table_width: expected "Literal[True]", got "bool"'

    assert message in answer
    assert message in (ROOT / "docs" / "write-a-builder.md").read_text(encoding="utf-8")
