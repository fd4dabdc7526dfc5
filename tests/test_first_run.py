"""The two commands of the README start from nothing but a Python, of any version."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.source_trees import ROOT
from tools.run import NEEDED, complaint

COMMAND = re.compile(r"^python3 tools/run\.py (\w+)$", re.MULTILINE)


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [((2, 7, 18), True), ((3, 10, 13), True), ((3, 11, 0), False), ((3, 14, 1), False)],
)
def test_an_old_python_is_told_so_in_one_sentence(
    version: tuple[int, ...], is_refused: bool
) -> None:
    told = complaint(version)

    assert (told is not None) is is_refused
    if told is not None:
        assert told.startswith("Python 3.11 or newer is needed")
        assert "\n" not in told


def test_the_script_is_read_by_any_python() -> None:
    """No syntax that Python 3.0 lacks, so that an old one comes as far as the sentence."""
    text = (ROOT / "tools" / "run.py").read_text(encoding="utf-8")

    nodes = list(ast.walk(ast.parse(text, feature_version=(3, 4))))

    assert not any(
        isinstance(node, ast.JoinedStr | ast.AnnAssign | ast.NamedExpr) for node in nodes
    )
    assert not any(isinstance(node, ast.FunctionDef) and node.returns for node in nodes)


@pytest.mark.parametrize(
    "python", sorted(Path.home().glob(".pyenv/versions/*/bin/python")), ids=lambda p: p.parts[-3]
)
def test_each_python_of_this_machine_that_is_too_old_is_told_so(python: Path) -> None:
    version = tuple(map(int, python.parts[-3].split(".")[:2]))
    if version >= NEEDED:
        pytest.skip("new enough")

    done = subprocess.run(
        [str(python), str(ROOT / "tools" / "run.py"), "demo"], capture_output=True, timeout=60
    )

    assert done.returncode == 2
    assert done.stderr.startswith(b"error: Python 3.11 or newer is needed, and this is ")
    assert done.stderr.count(b"\n") == 1


def test_the_readme_has_the_two_commands_and_what_they_need() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert COMMAND.findall(text) == ["demo", "test"]
    assert "Python 3.11 or newer" in text[: text.index("tools/run.py demo")]


def test_the_last_command_of_ci_is_the_readmes() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()

    assert lines[-1] == 'python3 tools/run.py test "$@"'


def test_a_script_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "run.py")],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
    )

    assert done.returncode == 2
    assert done.stderr == "usage: python3 tools/run.py SCRIPT [ARGUMENT ...]\n"
