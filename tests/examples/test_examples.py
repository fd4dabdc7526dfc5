"""Every example prints what its head shows, and stays short enough to be read at once."""

import ast
import contextlib
import io
import runpy
from pathlib import Path

import pytest
from tests.support.source_trees import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def shown(example: Path) -> str:
    """What an example's docstring says that it prints: all but the first paragraph."""
    head = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    return head.partition("\n\n")[2] + "\n"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_its_head_shows(example: Path) -> None:
    out = io.StringIO()

    with contextlib.redirect_stdout(out):
        runpy.run_path(str(example), run_name="__main__")

    assert out.getvalue() == shown(example)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_under_forty_lines(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 40


def test_there_are_five() -> None:
    assert len(EXAMPLES) == 5
