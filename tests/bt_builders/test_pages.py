"""The pages on builders are run, and what they show is what they print."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from tests.support.batches import Request, make_batch
from tests.support.plans import plan

from bt_builders import create_metadata_builders
from bt_width import AttentionSpec

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "write-a-builder.md"
README = ROOT / "packages" / "bt-builders" / "README.md"
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


def run_page(page: Path = PAGE) -> tuple[dict[str, object], list[str], list[str]]:
    """The page's names, what it prints and what it shows."""
    names: dict[str, object] = {"__name__": "page"}
    printed, shown = [], []
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "text":
            shown.append(text)
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, str(page), "exec"), names)
        if out.getvalue():
            printed.append(out.getvalue())
    return names, printed, shown


@pytest.mark.parametrize("page", [PAGE, README], ids=["write-a-builder", "readme"])
def test_the_page_prints_what_it_shows(page: Path) -> None:
    _, printed, shown = run_page(page)

    assert printed == [text for text in shown if "error:" not in text]


def test_the_pages_builders_build() -> None:
    names, _, _ = run_page()
    layout = plan(AttentionSpec(block_size=16), 200)
    classes = [names["LastBlocksBuilder"], names["ExpandingBuilder"]]
    common = make_batch(layout, [Request(40, 2), Request(16, 1)])

    ((last, expanding),) = create_metadata_builders(layout, classes, "cpu")  # type: ignore[arg-type]  # made by exec

    assert last.build(common).ids.tolist() == [3, 4]
    assert expanding.build(common).tolist() == common.block_table[[0, 0, 1]].tolist()
