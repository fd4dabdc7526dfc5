"""Writes a report as one HTML page: no script, nothing loaded, every text escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from .picture import UNKNOWN, PictureColumn, RowPicture

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --soft: #57606a; --line: #d0d7de;
  --bad: #a40e26; --bad-back: #ffebe9; --panel: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --soft: #9ea7b3;
  --line: #3d444d; --bad: #ff9b8e; --bad-back: #4c1715; --panel: #161b22; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 0; color: var(--bad); }
h3 { font-size: 1rem; margin: .8rem 0 .2rem; }
section { border: 1px solid var(--line); border-radius: 6px; background: var(--panel);
  padding: 1rem; margin: 1rem 0; }
.row { overflow-x: auto; }
table { border-collapse: collapse; font: 14px/1.4 ui-monospace, monospace; }
th, td { border: 1px solid var(--line); padding: .3rem .6rem; text-align: right;
  white-space: nowrap; }
th { color: var(--soft); font-weight: normal; text-align: left; }
.bad { background: var(--bad-back); color: var(--bad); font-weight: bold; }
p, li { margin: .3rem 0; } ol { margin: 0; padding-left: 1.5rem; } .note { color: var(--soft); }
"""


class Section(NamedTuple):
    """One finding on the page.

    Attributes:
        title: What is wrong, in a word.
        text: The finding on one line.
        picture: The row around it, None where it has none.
    """

    title: str
    text: str
    picture: RowPicture | None


def render_page(title: str, sections: Sequence[Section], notes: Sequence[str]) -> str:
    """Return a whole page; no string of the arguments can become markup."""
    body = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        body.append(f"<section><h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>")
        if section.picture is not None:
            body += _picture(section.picture)
        body.append("</section>")
    body += [f'<p class="note">{escape(note)}</p>' for note in notes]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # nothing is loaded and nothing runs, whatever a text may contain
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">",
            # an icon of its own, so that no browser asks for one
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _picture(picture: RowPicture) -> Iterator[str]:
    yield '<div class="row"><table>'
    yield _line("column", picture, [str(shown.column) for shown in picture.columns])
    yield _line("found", picture, [shown.found for shown in picture.columns])
    yield _line("expected", picture, [shown.expected for shown in picture.columns])
    yield _line("also held by", picture, [", ".join(shown.holders) for shown in picture.columns])
    yield "</table></div>"
    if picture.edits:
        yield "<h3>Last edits of the row</h3><ol>"
        yield from (f"<li>{escape(edit)}</li>" for edit in picture.edits)
        yield "</ol>"


def _line(name: str, picture: RowPicture, cells: Sequence[str]) -> str:
    drawn = "".join(
        f"<td{_mark(shown, picture)}>{escape(cell)}</td>"
        for shown, cell in zip(picture.columns, cells, strict=True)
    )
    return f'<tr><th scope="row">{name}</th>{drawn}</tr>'


def _mark(shown: PictureColumn, picture: RowPicture) -> str:
    differs = shown.expected not in (UNKNOWN, shown.found)
    return ' class="bad"' if differs or shown.column == picture.marked else ""
