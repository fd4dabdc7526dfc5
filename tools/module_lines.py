"""Copies the first line of every module to docs/architecture.md, or says where they differ.

python tools/module_lines.py            # exit code 1 where the page is not up to date
python tools/module_lines.py --write
"""

from __future__ import annotations

import ast
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("bt-width", "bt-tables", "bt-builders", "bt-runner")
START, END = "<!-- modules: tools/module_lines.py -->\n", "<!-- end of modules -->\n"


def module_lines() -> str:
    """Return one heading a package and one list item a module, in the order of the tree."""
    parts = []
    for package in PACKAGES:
        source = ROOT / "packages" / package / "src"
        parts.append(f"\n### {package}\n\n")
        parts += [_item(path, source) for path in sorted(source.rglob("*.py"), key=_order)]
    return "".join(parts) + "\n"


def _order(path: Path) -> tuple[object, ...]:
    """Order a folder's own line before its files, and files before folders."""
    if path.name == "__init__.py":
        return (*path.parent.parts, "")
    return (*path.parent.parts, "\x01" + path.name)


def _item(path: Path, source: Path) -> str:
    name = path.relative_to(source).with_suffix("").as_posix().removesuffix("/__init__")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return f"- `{name.replace('/', '.')}`: {paragraph}\n"


def main() -> int:
    """Compare or write; return the exit code."""
    page = PAGE.read_text(encoding="utf-8")
    head, start, rest = page.partition(START)
    _, end, tail = rest.partition(END)
    if not (start and end):
        print(f"{PAGE}: the markers of the module list are missing")
        return 1
    wanted = head + START + module_lines() + END + tail
    if "--write" in sys.argv[1:]:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    changes = list(difflib.unified_diff(page.splitlines(), wanted.splitlines(), lineterm="", n=0))
    if changes:
        print("docs/architecture.md is not up to date: run python tools/module_lines.py --write")
        print(*changes[2:], sep="\n")
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
