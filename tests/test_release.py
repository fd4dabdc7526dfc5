"""The release check finds what would make a bad release, and nothing else."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.source_trees import ROOT

pytest.importorskip("packaging")

from tools.release_check import PACKAGES, faults, version_of

Change = Callable[[Path], None]
BUILDERS = "packages/bt-builders/pyproject.toml"
VERSION = version_of(ROOT, PACKAGES[0])
MAJOR, MINOR, _ = VERSION.split(".")
NEXT_MINOR = f"{MAJOR}.{int(MINOR) + 1}"
VERSION_TABLE = "[tool.hatch.version]"
RANGE = f">={MAJOR}.{MINOR},<{NEXT_MINOR}"


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A copy of what the check reads, with its changelog dated."""
    for package in PACKAGES:
        name = package.replace("-", "_")
        folder = tmp_path / "packages" / package
        (folder / "src" / name).mkdir(parents=True)
        for file in ("pyproject.toml", "LICENSE", f"src/{name}/__init__.py"):
            shutil.copy(ROOT / "packages" / package / file, folder / file)
    shutil.copy(ROOT / "LICENSE", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## {VERSION} - 2026-12-01\n\n- bt-width: widths.\n", encoding="utf-8"
    )
    return tmp_path


def replace(file: str, old: str, new: str) -> Change:
    """A change of one file of the tree."""

    def change(root: Path) -> None:
        text = (root / file).read_text(encoding="utf-8")
        assert old in text
        (root / file).write_text(text.replace(old, new), encoding="utf-8")

    return change


def linked(url: str) -> str:
    """The table of the version, below one of links."""
    return f'[project.urls]\nSource = "{url}"\n\n{VERSION_TABLE}'


def test_a_tree_that_is_ready_has_no_fault(ready: Path) -> None:
    assert faults(ready) == []


def test_a_link_to_a_real_place_is_no_fault(ready: Path) -> None:
    replace(BUILDERS, VERSION_TABLE, linked("https://bt.dev/source"))(ready)

    assert faults(ready) == []


def test_this_tree_lacks_nothing_but_the_date() -> None:
    """Ranges and licences are right at any time; the date is written on the day."""
    undated = "CHANGELOG.md begins with 'Unreleased"

    assert [fault for fault in faults(ROOT) if not fault.startswith(undated)] == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        pytest.param(
            replace(
                "packages/bt-tables/src/bt_tables/__init__.py",
                '__version__ = "',
                '__version__ = "9',
            ),
            "versions move in step",
            id="one-version-moved-alone",
        ),
        pytest.param(
            replace("packages/bt-runner/src/bt_runner/__init__.py", "__version__", "version"),
            "bt-runner ?",
            id="no-version",
        ),
        pytest.param(replace("CHANGELOG.md", " - 2026-12-01", ""), "write '## ", id="no-date"),
        pytest.param(
            replace("CHANGELOG.md", "2026-12-01", "2026-13-01"), "no date", id="no-such-day"
        ),
        pytest.param(
            replace("CHANGELOG.md", f"## {MAJOR}.", f"## 7{MAJOR}."),
            "the packages are",
            id="another-version",
        ),
        pytest.param(
            replace("CHANGELOG.md", "- bt-width: widths.", ""), "says nothing", id="no-entry"
        ),
        pytest.param(
            replace("CHANGELOG.md", "bt-width:", "Widths:"), "begins with its package", id="whose"
        ),
        pytest.param(
            replace(BUILDERS, f"bt-tables{RANGE}", f"bt-tables>{VERSION},<{NEXT_MINOR}"),
            f"which is not {VERSION}",
            id="a-range-without-this-version",
        ),
        pytest.param(
            replace(BUILDERS, f"bt-tables{RANGE}", f"bt-tables>={VERSION}"),
            f"which takes {NEXT_MINOR}, too",
            id="a-range-without-an-end",
        ),
        *(
            pytest.param(
                replace(BUILDERS, VERSION_TABLE, linked(url)),
                "which is no place",
                id=url,
            )
            for url in (
                "https://example.invalid/bt",
                "https://www.example.com/bt",
                "https://localhost/bt",
                "http://bt.dev",
                "bt",
            )
        ),
        pytest.param(
            replace("packages/bt-width/LICENSE", "Apache", "Another"),
            "another LICENSE",
            id="licence",
        ),
    ],
)
def test_a_fault_is_named(ready: Path, change: Change, fault: str) -> None:
    change(ready)

    (found,) = faults(ready)

    assert fault in found
