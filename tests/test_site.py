"""The documentation site holds every page and every public name, each with a place that uses it."""

import importlib

import pytest
from tests.support.source_trees import PACKAGES, ROOT

pytest.importorskip("mkdocs")

from tools import docs_site


@pytest.mark.parametrize("package", PACKAGES)
def test_the_names_are_the_packages(package: str) -> None:
    """They are read without an import, and an import agrees."""
    offered = set(importlib.import_module(package).__all__) - {"__version__"}

    assert set(docs_site.public_names(package)) == offered


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_leads_to_an_example(package: str) -> None:
    """Code of a page or an example uses the name, or the reference links to a name it uses."""
    lost = [
        name
        for name in docs_site.public_names(package)
        if not docs_site.examples_of(name)
        and not any(docs_site.examples_of(user) for user in docs_site.users_of(name))
    ]

    assert lost == []


def test_the_reference_links_to_examples_and_users() -> None:
    width = docs_site.reference("bt_width")
    _, entry = width.split("::: bt_width.tables_bytes\n")

    assert "[one-piece-at-a-time](../one-piece-at-a-time.md)" in entry.split(":::")[0]
    _, entry = width.split("::: bt_width.MAX_POSITION\n")
    assert "Used by: [BlockTableLayout][bt_width.BlockTableLayout]" in entry.split(":::")[0]


def test_every_page_of_docs_is_in_the_site() -> None:
    pages = docs_site.pages()

    for path in (ROOT / "docs").glob("*.md"):
        assert path.name in pages


def test_links_of_the_readme_lead_to_pages_of_the_site() -> None:
    text = docs_site.site_text("index.md")
    pages = docs_site.pages()

    for link in docs_site.LINK.findall(text):
        assert link[1] in pages or (ROOT / "docs" / link[1]).exists(), link[1]
