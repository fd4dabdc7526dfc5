"""A project of somebody else's, built on the wheels: it runs, and its types are checked."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.pages import read_blocks
from tests.support.source_trees import ROOT
from tests.support.wheels import build, build_all, install, run

pytest.importorskip("hatchling")
pytest.importorskip("mypy")
pytest.importorskip("pip")

PROJECT = ROOT / "examples" / "downstream"
REFUSED = PROJECT / "typing" / "refused.py"
MARK = re.compile(r"# refused: (.+)$", re.MULTILINE)
ANSWER = re.compile(r"^(.+\.py):(\d+): error: .*\[([a-z-]+)\]$", re.MULTILINE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with all four packages and the project, from wheels."""
    wheels = build_all(tmp_path_factory.mktemp("wheels"), "wheel")
    own = build(PROJECT, tmp_path_factory.mktemp("project") / "wheel", "wheel")
    folder = tmp_path_factory.mktemp("environment") / "installed"
    return install(folder, [*wheels.values(), own], beside_torch=True)


@pytest.fixture(scope="module", params=["wheels", "editable"])
def answer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy --strict says, without this tree's settings, of the project and of its refusals."""
    python = request.getfixturevalue("installed") if request.param == "wheels" else sys.executable
    done = subprocess.run(
        [
            *[sys.executable, "-m", "mypy", "--strict", "--config-file="],
            *["--python-executable", str(python)],
            *["--cache-dir", str(ROOT / ".mypy_cache" / "downstream")],
            *[str(PROJECT / "src"), str(REFUSED)],
        ],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env={**os.environ, "MYPYPATH": str(PROJECT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_its_step_runs_where_the_wheels_are_installed(installed: Path) -> None:
    page = (PROJECT / "README.md").read_text(encoding="utf-8")
    (shown,) = [block.text for block in read_blocks(page) if block.language == "text"]

    assert run([str(installed), "-I", "-m", "token_attention"]) == shown


def test_its_types_are_accepted_and_five_wrong_uses_refused(answer: str) -> None:
    """Line by line, with the expected error codes, and nothing in the project itself."""
    found = sorted((Path(file).name, int(n), code) for file, n, code in ANSWER.findall(answer))
    marks = [
        (REFUSED.name, number, code)
        for number, line in enumerate(REFUSED.read_text(encoding="utf-8").splitlines(), 1)
        for mark in MARK.findall(line)
        for code in mark.split(", ")
    ]

    assert len({number for _, number, _ in marks}) == 5
    assert found == marks


def test_it_is_no_member_of_the_workspace() -> None:
    assert "downstream" not in (ROOT / "hatch.toml").read_text(encoding="utf-8")
