"""Builds pages of the documentation site from what stands elsewhere in the tree (a mkdocs hook).

The first page is the root's README; each package has its README and a reference of its public
names, made from their docstrings, each with links to the pages and examples that use it.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("bt_width", "bt_tables", "bt_builders", "bt_runner")
LINK = re.compile(r"(\]\()(?!https?://|#)([^)#\s]+)")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> dict[str, Path]:
    """Return the site's page of each Markdown file, of each package's folder and of examples."""
    found = {
        "index.md": ROOT / "README.md",
        "contributing.md": ROOT / "CONTRIBUTING.md",
        "changelog.md": ROOT / "CHANGELOG.md",
    }
    for package in PACKAGES:
        name = package.replace("_", "-")
        found[f"packages/{name}.md"] = ROOT / "packages" / name / "README.md"
    found |= {path.name: path for path in sorted((ROOT / "docs").glob("*.md"))}
    found |= {f"examples/{path.stem}.md": path for path in sorted((ROOT / "examples").glob("*.py"))}
    found["examples/downstream.md"] = ROOT / "examples" / "downstream" / "README.md"
    return found


def public_names(package: str) -> list[str]:
    """Return what a package offers, read without importing it."""
    source = ROOT / "packages" / package.replace("_", "-") / "src" / package / "__init__.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if name != "__version__"]
    raise LookupError(f"{source} has no __all__")


@cache
def examples_of(name: str) -> list[str]:
    """Return the pages and examples whose code uses a public name."""
    word = re.compile(rf"\b{name}\b")
    return [page for page, code in _code_of_pages() if word.search(code)]


@cache
def definitions() -> dict[str, str]:
    """Return the source of each public name's definition, by name."""
    wanted = {name for package in PACKAGES for name in public_names(package)}
    found = {}
    for path in sorted((ROOT / "packages").glob("*/src/**/*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            for name in wanted.intersection(_defined(node)):
                found[name] = ast.get_source_segment(text, node) or ""
    return found


def _defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def users_of(name: str) -> list[str]:
    """Return the public names that take, return or hold this one, those with an example first."""
    word = re.compile(rf"\b{name}\b")
    users = [user for user, text in definitions().items() if user != name and word.search(text)]
    return sorted(users, key=lambda user: (not examples_of(user), user))


@cache
def _code_of_pages() -> tuple[tuple[str, str], ...]:
    return tuple(_read_code())


def _read_code() -> Iterator[tuple[str, str]]:
    for page, path in pages().items():
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            yield page, text
        elif code := "".join(BLOCK.findall(text)):
            yield page, code


def reference(package: str) -> str:
    """Return the page of references of a package, as mkdocstrings reads it."""
    parts = [f"# {package}\n"]
    for name in public_names(package):
        parts.append(f"::: {package}.{name}\n")
        links = [f"[{posixpath.splitext(page)[0]}](../{page})" for page in examples_of(name)]
        if links:
            parts.append(f"Used in: {', '.join(links)}.\n")
        elif users := users_of(name):
            parts.append(f"Used by: {', '.join(_linked(user) for user in users)}.\n")
    return "\n".join(parts)


def _linked(name: str) -> str:
    (package,) = [package for package in PACKAGES if name in public_names(package)]
    return f"[{name}][{package}.{name}]"


def site_text(page: str) -> str:
    """Return a page with its links brought to where things stand in the site."""
    path = pages()[page]
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return f"# {path.name}\n\n```python\n{text}```\n"
    places = {source.resolve(): target for target, source in pages().items()}
    for package in PACKAGES:
        folder = ROOT / "packages" / package.replace("_", "-")
        places[folder] = f"packages/{folder.name}.md"
    places[ROOT / "examples"] = "examples/how_wide_is_my_table.md"

    def moved(match: re.Match[str]) -> str:
        source = (path.parent / match[2]).resolve()
        target = places.get(source)
        if target is None and source.is_relative_to(ROOT / "docs"):
            target = str(source.relative_to(ROOT / "docs"))
        if target is None:
            return match[0]
        return match[1] + posixpath.relpath(target, posixpath.dirname(page) or ".")

    return LINK.sub(moved, text)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Put every page into the site."""
    texts = {page: site_text(page) for page in pages()}
    texts |= {f"reference/{package}.md": reference(package) for package in PACKAGES}
    for page, text in texts.items():
        found = files.get_file_from_path(page)
        if found is not None:
            files.remove(found)
        files.append(File.generated(config, page, content=text))
    return files
