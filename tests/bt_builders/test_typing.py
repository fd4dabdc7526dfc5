"""A builder whose flag, constructor and ``build`` disagree is refused by the type checkers."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TYPING = Path(__file__).parent / "typing"
ROOT = Path(__file__).parents[2]
FILES = [str(TYPING / "accepted.py"), str(TYPING / "refused.py")]
MARK = re.compile(r"# refused: (.+)$")
ANSWER = re.compile(r"refused\.py:(\d+): error: .*\[([a-z-]+)\]$", re.MULTILINE)
PYRIGHTS = [Path(sys.executable).parent / name for name in ("basedpyright", "pyright")]


@pytest.fixture(scope="module")
def mypy() -> str:
    """What mypy says of both files, with the tree's own configuration and cache."""
    pytest.importorskip("mypy")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *FILES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def pyright() -> list[tuple[str, int]]:
    """The file and line of each error that pyright, or a build of it, finds in both files."""
    found = next((path for path in PYRIGHTS if path.exists()), None) or shutil.which("pyright")
    if found is None:
        pytest.skip("neither basedpyright nor pyright is installed")
    done = subprocess.run(
        [found, "--outputjson", "--level", "error", "--pythonpath", sys.executable, *FILES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if not done.stdout.lstrip().startswith("{"):
        pytest.skip(f"{found} does not run here: {done.stderr[-200:]}")
    return [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    ]


def marks() -> list[tuple[int, str]]:
    """The lines that must be refused, with mypy's code."""
    lines = (TYPING / "refused.py").read_text(encoding="utf-8").splitlines()
    return [(n, mark[1]) for n, line in enumerate(lines, 1) if (mark := MARK.search(line))]


def test_mypy_accepts_builders_of_ones_own(mypy: str) -> None:
    assert "accepted.py" not in mypy


def test_mypy_refuses_wrong_builders_line_by_line(mypy: str) -> None:
    found = [(int(match[1]), match[2]) for match in ANSWER.finditer(mypy)]

    assert len(marks()) == 8
    assert found == marks()


def test_pyright_refuses_the_same_lines_and_no_other(pyright: list[tuple[str, int]]) -> None:
    assert sorted(pyright) == [("refused.py", line) for line, _ in marks()]


def test_a_flag_without_its_literal_is_told_so(mypy: str) -> None:
    """The message that ``docs/write-a-builder.md`` shows."""
    message = (
        'note: "WithoutLiteral" has constructor incompatible with "__call__" of "WidthBuilderClass"'
    )

    assert message in mypy
    assert message in (ROOT / "docs" / "write-a-builder.md").read_text(encoding="utf-8")
