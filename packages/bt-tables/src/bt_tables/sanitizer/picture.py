"""A part of a row drawn: the expected ids under those found, and other holders of the blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table

UNKNOWN = "?"
"""What stands where the expected id is not known."""


class PictureColumn(NamedTuple):
    """One column of a picture.

    Attributes:
        column: Its number.
        found: The id in it.
        expected: The id that belongs there, ``UNKNOWN`` where that is not known.
        holders: The other requests of the batch whose rows hold the block.
    """

    column: int
    found: str
    expected: str
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPicture:
    """A part of a row; ``str`` draws it in plain text, rich in colours.

    Attributes:
        title: The finding on one line.
        columns: The columns that are shown.
        marked: The column of the finding, None where it has none.
        edits: The row's last edits, oldest first, where they are known.
    """

    title: str
    columns: tuple[PictureColumn, ...]
    marked: int | None
    edits: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the picture as lines of text, the finding's column marked below."""
        lines = [
            ("column", *(str(shown.column) for shown in self.columns)),
            ("found", *(shown.found for shown in self.columns)),
            ("expected", *(shown.expected for shown in self.columns)),
            ("", *("^" if shown.column == self.marked else "" for shown in self.columns)),
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
        from rich.text import Text

        # ids of requests come from outside: they must not be read as markup
        table = Table(title=Text(self.title), title_justify="left")
        for header in ("column", "found", "expected"):
            table.add_column(header, justify="right")
        for shown in self.columns:
            style = "bold red" if shown.column == self.marked else None
            table.add_row(str(shown.column), shown.found, shown.expected, style=style)
        return table

    def show(self) -> None:
        """Print the picture, through rich where it is installed."""
        try:
            from rich.console import Console
        except ImportError:
            print(self)
        else:
            Console().print(self)
