"""The pages' pictures in a real browser: no text of them is cut, whatever the screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.browser import CHROMIUM, measure_page
from tests.support.source_trees import ROOT

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: CONTRIBUTING.md says how to install one"
)
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
PAGE = (
    "<!doctype html><style>svg {{ max-width: 100%; height: auto }}</style><body>{}<p>p</p></body>"
)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_no_text_of_a_picture_is_cut(picture: Path, width: int, dark: bool, tmp_path: Path) -> None:
    page = PAGE.format(picture.read_text(encoding="utf-8"))

    seen = measure_page(page, tmp_path, width=width, dark=dark)

    assert seen["cut"] == []
    assert seen["overflow"] <= 0
