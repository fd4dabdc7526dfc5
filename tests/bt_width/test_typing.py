"""The types say what is right: mypy accepts one file, and refuses every wrong line of another."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("mypy")

TYPING = Path(__file__).parent / "typing"
ROOT = Path(__file__).parents[2]
MARK = re.compile(r"# refused: (.+)$")
ANSWER = re.compile(r":(\d+): error: .*\[([a-z-]+)\]$")


def _mypy(path: Path, cache: Path) -> tuple[int, dict[int, set[str]]]:
    """Exit code, and the codes of each refused line; the tree's own configuration."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(cache), "--no-error-summary", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    codes: dict[int, set[str]] = defaultdict(set)
    for line in done.stdout.splitlines():
        if path.name in line and (answer := ANSWER.search(line)):
            codes[int(answer[1])].add(answer[2])
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, dict(codes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


def test_right_uses_are_accepted(cache: Path) -> None:
    assert _mypy(TYPING / "accepted.py", cache) == (0, {})


def test_wrong_uses_are_refused_line_by_line(cache: Path) -> None:
    """An int where a width is wanted, a kind forgotten in a ``match``, and others."""
    path = TYPING / "refused.py"
    marks = {
        number: set(mark[1].split(", "))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (mark := MARK.search(line))
    }

    assert len(marks) >= 10
    assert _mypy(path, cache) == (1, marks)
