"""A report as a page: everything on it, nothing that runs or loads, readable in both themes."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from tests.support.browser import CHROMIUM, measure_page, open_page
from tests.support.plans import serving_limits

from bt_tables.sanitizer import BlockTableSanitizer, FaultKind, SanitizerReport
from bt_tables.sanitizer.picture import UNKNOWN
from bt_width import AttentionSpec, BlockTableLayout

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'"
LAYOUT = BlockTableLayout.plan(AttentionSpec(block_size=32), serving_limits(256), 16)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine; install the package chromium"
)


def report() -> SanitizerReport:
    """Two requests, one of which has a block of the other, and a name that looks like markup."""
    table = torch.zeros(2, LAYOUT.width, dtype=torch.int32)
    table[0, :4] = torch.tensor([14, 15, 6, 7])
    table[1, :4] = torch.tensor([10, 11, 6, 7])
    return BlockTableSanitizer([LAYOUT], [16], mode="report").check(
        [table],
        torch.tensor([[6 * 16 + 1, 6 * 16 + 2]]),
        torch.tensor([34, 35]),
        torch.tensor([0, 1, 2]),
        num_blocks_of_row=torch.tensor([[2], [2]]),
        ref_blocks=[torch.tensor([[7, 3], [5, 4]], dtype=torch.int32)],
        request_ids=["chat-1", HOSTILE],
        edits_of=lambda row: [f"step 3: row {row} got block 4 of {HOSTILE}"],
    )


class Elements(HTMLParser):
    """Collects a page's elements, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Elements:
    elements = Elements()
    elements.feed(html)
    return elements


@pytest.mark.fast
def test_the_page_holds_every_line_of_the_text() -> None:
    page = report()

    words = "\n".join(read(page.to_html()).text)

    assert page.num_faults == len(page.findings) > 1
    for line in page.text.splitlines():
        assert line.strip() in words


@pytest.mark.fast
def test_only_what_differs_and_the_column_of_the_finding_are_marked() -> None:
    found = report()
    pictures = [finding.picture for finding in found.findings if finding.picture is not None]
    marked = [
        str(shown.column)
        for picture in pictures
        for shown in picture.columns
        if shown.column == picture.marked or shown.expected not in (UNKNOWN, shown.found)
    ]

    headings = re.findall(r'<th scope="row">column</th>(.*?)</tr>', found.to_html())

    assert [
        column for line in headings for column in re.findall(r'class="bad">(\d+)<', line)
    ] == marked
    assert 0 < len(marked) < sum(len(picture.columns) for picture in pictures)


@pytest.mark.fast
def test_the_page_shows_the_row_expected_found_holders_and_edits() -> None:
    text = read(report().to_html()).text

    words = " ".join(text)

    assert {"column", "found", "expected", "also held by", "Last edits of the row"} <= set(text)
    assert "step 3: row 1 got block 4" in words
    assert "'chat-1'" in text


@pytest.mark.fast
def test_no_text_from_outside_becomes_markup() -> None:
    html = report().to_html()

    found = read(html)

    assert found.names.isdisjoint({"script", "img", "iframe", "a"})
    assert found.attributes <= {
        *("lang", "charset", "name", "content", "http-equiv", "rel", "href", "class", "scope")
    }
    assert HOSTILE not in html


@pytest.mark.fast
def test_the_page_refers_to_nothing_outside_itself() -> None:
    html = report().to_html()

    assert not re.search(r"https?:|url\(|@import|src=", html.replace("img src=x", ""))


@pytest.mark.fast
def test_a_report_without_findings_is_a_page_too() -> None:
    empty = SanitizerReport(step=3)

    assert "step 3: no faults" in empty.to_html()
    assert "step 4: not checked" in SanitizerReport(step=4, checked=False).to_html()


@needs_browser
def test_a_browser_shows_the_page_without_a_complaint(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report().to_html(), encoding="utf-8")

    console = open_page(path)

    assert "CONSOLE" not in console


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_is_readable(tmp_path: Path, width: int, dark: bool) -> None:
    """Nothing sticks out, and every text stands out from what is behind it (4.5 to 1)."""
    page = report()

    measured = measure_page(page.to_html(), tmp_path, width=width, dark=dark)

    assert measured["width"] == width
    assert measured["overflow"] <= 0
    assert measured["contrast"] >= 4.5
    assert (measured["back"] == "rgb(255, 255, 255)") is not dark
    drawn = [finding.picture for finding in page.findings if finding.picture is not None]
    shown = [column.found for picture in drawn for column in picture.columns]
    assert [cell for cell in measured["cells"] if cell in shown]
    assert "img" not in measured["elements"]


@pytest.mark.fast
def test_the_kinds_stand_as_headings() -> None:
    page = report()

    headings = re.findall(r"<h2>(.*?)</h2>", page.to_html())

    assert headings == [str(finding.kind) for finding in page.findings]
    assert FaultKind.WRONG_BLOCK in headings
