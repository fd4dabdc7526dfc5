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


def test_every_page_of_docs_is_in_the_site() -> None:
    pages = docs_site.pages()

    for path in (ROOT / "docs").glob("*.md"):
        assert path.name in pages


def test_links_of_the_readme_lead_to_pages_of_the_site() -> None:
    text = docs_site.site_text("index.md")
    pages = docs_site.pages()

    for link in docs_site.LINK.findall(text):
        assert link[1] in pages or (ROOT / "docs" / link[1]).exists(), link[1]
