"""A finding drawn: the row around its column, the expected ids under those found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bt_width import NULL_BLOCK, BlockTableLayout, InvalidEditError

from .findings import FaultKind, Finding

if TYPE_CHECKING:
    from rich.table import Table

_KNOWS_THE_ID = (FaultKind.BROKEN_SPLIT, FaultKind.STALE_TAIL, FaultKind.PADDING_ROW)

UNKNOWN = "?"
"""What stands where nobody said which id belongs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPicture:
    """A part of a row; ``str`` draws it in plain text, rich in colours.

    Attributes:
        title: The finding on one line.
        columns: The columns that are shown.
        found: What they hold.
        expected: What they should hold, ``UNKNOWN`` where that is not known.
        marked: The column of the finding, None where it has none.
    """

    title: str
    columns: tuple[int, ...]
    found: tuple[str, ...]
    expected: tuple[str, ...]
    marked: int | None

    def __str__(self) -> str:
        """Return the picture as lines of text, the finding's column marked below."""
        marks = ["^" if column == self.marked else "" for column in self.columns]
        lines = [
            ("column", *map(str, self.columns)),
            ("found", *self.found),
            ("expected", *self.expected),
            ("", *marks),
        ]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        drawn = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *filter(None, drawn)])

    def __rich__(self) -> Table:
        """Return the picture as a table that rich can print."""
        from rich.table import Table

        table = Table(title=self.title, title_justify="left")
        for header in ("column", "found", "expected"):
            table.add_column(header, justify="right")
        for column, found, expected in zip(self.columns, self.found, self.expected, strict=True):
            style = "bold red" if column == self.marked else None
            table.add_row(str(column), found, expected, style=style)
        return table

    def show(self) -> None:
        """Print the picture, through rich where it is installed."""
        try:
            from rich.console import Console
        except ImportError:
            print(self)
        else:
            Console().print(self)


def draw_row(
    finding: Finding,
    layout: BlockTableLayout,
    block_table: torch.Tensor,
    *,
    block_ids: Sequence[int] | None = None,
    around: int = 4,
) -> RowPicture:
    """Draw the row of a finding around its column.

    Args:
        finding: The finding; it must have a row.
        layout: The layout of its group.
        block_table: The group's [rows, W] table.
        block_ids: The blocks that the request holds, where somebody knows them.
        around: Columns on each side.

    Raises:
        InvalidEditError: The finding has no row, or the table does not have it.
        BlockTableError: ``block_ids`` are no row of this layout.
    """
    row, marked = finding.row, finding.column
    if row is None or not 0 <= row < block_table.shape[0]:
        raise InvalidEditError(
            f"the finding's row {row} is not one of the table's {block_table.shape[0]}: {finding}",
            row=row,
            num_rows=block_table.shape[0],
        )
    width = block_table.shape[1]
    centre = min(marked or 0, max(width - 1, 0))
    columns = range(max(centre - around, 0), min(centre + around + 1, width))
    found = block_table[row, columns.start : columns.stop].tolist()
    return RowPicture(
        title=finding.text,
        columns=tuple(columns),
        found=tuple(map(str, found)),
        expected=tuple(_expected(finding, layout, block_ids, columns)),
        marked=marked,
    )


def _expected(
    finding: Finding,
    layout: BlockTableLayout,
    block_ids: Sequence[int] | None,
    columns: range,
) -> list[str]:
    if block_ids is not None:
        ids = layout.expand(block_ids)
        return [str(ids[column] if column < len(ids) else NULL_BLOCK) for column in columns]
    known = finding.column if finding.kind in _KNOWS_THE_ID else None
    return [str(finding.expected) if column == known else UNKNOWN for column in columns]
