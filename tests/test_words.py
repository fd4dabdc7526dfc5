"""Plain words, and one word for one thing: what docs/glossary.md and the field call it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.source_trees import ROOT

INSTEAD = {
    "nobody": "no request, no rank, no block",
    "whom": "a sentence with the subject in front",
    "such thing": "what is wrong with it",
    "there is no such": "what is wrong with it",
    "there is not": "what is missing",
    "broke off": "failed",
    "breaks off": "fails",
    "twin": "reference",
    "twins": "references",
    "geometry": "shape, or cache spec",
    "surroundings": "scenario, or environment",
    "outcomes": "results",
    "facts": "details",
    "fact": "field, or detail",
    "books": "reference counts",
    "settle": "commit, or update",
    "settled": "committed, or up to date",
    "commons": "per-group metadata",
    "requestrows": "KV cache manager",
    "stepplan": "scheduler output",
    "batcharrays": "input batch",
    "stepunderway": "in-flight step",
}
PLACES = ["packages", "docs", "tests", "benchmarks", "examples", "tools"]
PAGES = ["README.md", "CONTRIBUTING.md"]
WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(INSTEAD)})(?![a-z])")


def found_in(text: str) -> list[tuple[int, str]]:
    """Lines and words; a name's underscores part its words as blanks do."""
    lines = text.lower().replace("_", " ").splitlines()
    return [(number, word) for number, line in enumerate(lines, 1) for word in WORD.findall(line)]


def files() -> Iterator[Path]:
    """All code and pages but this one, which names the words."""
    places = [path for place in PLACES for path in sorted((ROOT / place).rglob("*"))]
    for path in [*places, *(ROOT / page for page in PAGES)]:
        if path.suffix in (".py", ".md") and path != Path(__file__).resolve():
            yield path


def test_the_words_are_plain_and_the_fields() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}: say {INSTEAD[word]}"
        for path in files()
        for line, word in [
            *((0, word) for _, word in found_in(path.stem)),
            *found_in(path.read_text(encoding="utf-8")),
        ]
    ]

    assert wrong == []


@pytest.mark.parametrize(
    "text", ["Nobody holds it.", "def test_the_kernels_twin() -> None:", "class StepPlan:"]
)
def test_a_word_is_seen_in_sentences_and_names(text: str) -> None:
    """The test above can fail."""
    assert [line for line, _ in found_in(text)] == [1]


@pytest.mark.parametrize("text", ["bookkeeping", "a factor", "notebooks", "between"])
def test_a_part_of_a_word_is_none(text: str) -> None:
    assert found_in(text) == []
