"""The row around a finding, as text and through rich."""

import io
import sys

import pytest
import torch
from tests.support.plans import serving_limits

from bt_tables.sanitizer import FaultKind, Finding, draw_row
from bt_width import AttentionSpec, BlockTableLayout, InvalidEditError, RowOverflowError

pytestmark = pytest.mark.fast

LAYOUT = BlockTableLayout.plan(AttentionSpec(block_size=32), serving_limits(256), 16)
TABLE = torch.zeros(4, 16, dtype=torch.int32)
TABLE[1, :6] = torch.tensor([14, 15, 6, 9, 10, 11])
FINDING = Finding(
    kind=FaultKind.BROKEN_SPLIT, group=0, row=1, request=1, column=3, value=9, expected=7
)


def test_the_expected_ids_stand_under_the_found_ones() -> None:
    picture = draw_row(FINDING, LAYOUT, TABLE, block_ids=[7, 3, 5], around=2)

    assert str(picture).splitlines() == [
        FINDING.text,
        "  column   1  2  3   4   5",
        "   found  15  6  9  10  11",
        "expected  15  6  7  10  11",
        "                 ^",
    ]


def test_what_is_unknown_is_a_question_mark() -> None:
    picture = draw_row(FINDING, LAYOUT, TABLE, around=1)

    assert [shown.expected for shown in picture.columns] == ["?", "7", "?"]


def test_the_picture_ends_where_the_row_does() -> None:
    tail = Finding(kind=FaultKind.STALE_TAIL, group=0, row=1, column=15, value=3, expected=0)
    head = Finding(kind=FaultKind.FREED_BLOCK, group=0, row=1, column=0, value=14)

    end = draw_row(tail, LAYOUT, TABLE, block_ids=[7]).columns
    start = draw_row(head, LAYOUT, TABLE).columns

    assert [(shown.column, shown.expected) for shown in end] == [(at, "0") for at in range(11, 16)]
    assert [shown.column for shown in start] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("row", range(4))
def test_every_row_of_the_table_may_be_drawn(row: int) -> None:
    picture = draw_row(Finding(kind=FaultKind.WIDTH, row=row), LAYOUT, TABLE, around=2)

    assert [shown.found for shown in picture.columns] == list(map(str, TABLE[row, :3].tolist()))


def test_a_column_far_to_the_right_is_marked() -> None:
    table = torch.zeros(1, 400, dtype=torch.int32)
    finding = Finding(kind=FaultKind.STALE_TAIL, row=0, column=int("300"), value=0, expected=0)

    *_, marks = str(draw_row(finding, LAYOUT, table, around=1)).splitlines()

    assert marks.split() == ["^"]


@pytest.mark.parametrize("row", [None, 4, -1])
def test_a_finding_without_a_row_of_the_table_is_refused(row: int | None) -> None:
    with pytest.raises(InvalidEditError, match=f"row {row} is not one of the table's 4: width"):
        draw_row(Finding(kind=FaultKind.WIDTH, row=row), LAYOUT, TABLE)


def test_blocks_that_are_no_row_are_refused() -> None:
    with pytest.raises(RowOverflowError):
        draw_row(FINDING, LAYOUT, TABLE, block_ids=list(range(1, 100)))


def test_rich_draws_the_same_numbers() -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=100)

    console.print(draw_row(FINDING, LAYOUT, TABLE, block_ids=[7, 3, 5]))

    drawn = console.file.getvalue()
    assert all(number in drawn for number in ("14", "15", "9", "7"))


def test_rich_shows_the_findings_column_in_red() -> None:
    pytest.importorskip("rich")

    table = draw_row(FINDING, LAYOUT, TABLE, around=2).__rich__()

    assert [row.style for row in table.rows] == [None, None, "bold red", None, None]


def test_without_rich_the_picture_is_printed_as_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    picture = draw_row(FINDING, LAYOUT, TABLE)

    picture.show()

    assert capsys.readouterr().out == f"{picture}\n"
