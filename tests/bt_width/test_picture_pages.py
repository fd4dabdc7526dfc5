"""The pages show the pictures that the commands beside them draw."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.source_trees import ROOT

COMMAND = re.compile(r"^bt-width (plan .*--svg (docs/pictures/\w+\.svg))$", re.MULTILINE)
PAGES = [ROOT / "README.md", ROOT / "docs" / "contract.md"]


def commands() -> list[tuple[str, str]]:
    return [found for page in PAGES for found in COMMAND.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("place", [0, 1], ids=["readme", "contract"])
def test_the_pages_show_what_their_command_draws(place: int, tmp_path: Path) -> None:
    command, picture = commands()[place]
    arguments = shlex.split(command)
    arguments[-1] = str(tmp_path / "drawn.svg")

    subprocess.run(
        [sys.executable, "-m", "bt_width", *arguments], check=True, capture_output=True, timeout=60
    )

    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / picture).read_text(encoding="utf-8")


def test_two_pictures_are_shown() -> None:
    assert len(commands()) == 2
    for page in PAGES:
        for link in re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).is_file()
