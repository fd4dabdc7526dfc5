"""Says what stands between this tree and a release: changelog, versions, ranges, links, licences.

python tools/release_check.py           # exit code 1 and one line a fault; 0 where there is none
"""

from __future__ import annotations

import re
import sys
import tomllib
from datetime import date
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("bt-width", "bt-tables", "bt-builders", "bt-runner")
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
# names that never lead anywhere
RESERVED = re.compile(r"(^|\.)(example(\.com|\.net|\.org)?|invalid|test|localhost)$")
RELEASED = re.compile(r"(\d+\.\d+\.\d+) - (\d{4}-\d{2}-\d{2})")


def faults(root: Path) -> list[str]:
    """Return what is wrong with the tree at ``root``, one line each."""
    versions = {package: version_of(root, package) for package in PACKAGES}
    found = version_faults(versions)
    if not found:
        version = Version(versions[PACKAGES[0]])
        found += changelog_faults((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
        for package in PACKAGES:
            path = root / "packages" / package / "pyproject.toml"
            found += range_faults(package, path.read_text(encoding="utf-8"), version)
    return found + url_faults(root) + licence_faults(root)


def version_of(root: Path, package: str) -> str:
    """Return the literal in the package's ``__init__``, or an empty string."""
    source = root / "packages" / package / "src" / package.replace("-", "_") / "__init__.py"
    found = VERSION.search(source.read_text(encoding="utf-8"))
    return found[1] if found else ""


def version_faults(versions: dict[str, str]) -> list[str]:
    """Return a fault where a package has no version, or another one."""
    if len(set(versions.values())) == 1 and all(versions.values()):
        return []
    listed = ", ".join(f"{package} {version or '?'}" for package, version in versions.items())
    return [f"versions move in step, but these differ: {listed}"]


def changelog_faults(text: str, version: Version) -> list[str]:
    """Return what keeps the first section from being that of ``version``, dated and filled."""
    titles = SECTION.findall(text)
    released = RELEASED.fullmatch(titles[0]) if titles else None
    if released is None:
        title = titles[0] if titles else "nothing"
        return [f"CHANGELOG.md begins with {title!r}: write '## {version} - <date>' there"]
    found = []
    if Version(released[1]) != version:
        found.append(f"CHANGELOG.md begins with {released[1]}, the packages are {version}")
    try:
        date.fromisoformat(released[2])
    except ValueError:
        found.append(f"CHANGELOG.md: {released[2]} is no date")
    entries = [line for line in SECTION.split(text)[2].splitlines() if line.startswith("- ")]
    if not entries:
        found.append(f"CHANGELOG.md says nothing of {released[1]}")
    for entry in entries:
        if entry[2:].partition(":")[0] not in PACKAGES:
            found.append(f"CHANGELOG.md: an entry begins with its package, not {entry[2:42]!r}")
    return found


def range_faults(package: str, pyproject: str, version: Version) -> list[str]:
    """Return the requirements on siblings that do not take ``version``, or take the next minor."""
    next_minor = f"{version.major}.{version.minor + 1}"
    found = []
    for text in tomllib.loads(pyproject)["project"]["dependencies"]:
        requirement = Requirement(text)
        if requirement.name not in PACKAGES:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{package} asks for {text}, which is not {version}")
        if requirement.specifier.contains(next_minor):
            found.append(f"{package} asks for {text}, which takes {next_minor}, too")
    return found


def url_faults(root: Path) -> list[str]:
    """Return the links of packages that lead nowhere: reserved names, and no https."""
    found = []
    for package in PACKAGES:
        path = root / "packages" / package / "pyproject.toml"
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for label, url in project.get("urls", {}).items():
            host = urlsplit(url).hostname or ""
            is_reserved = RESERVED.search(host) is not None
            if is_reserved or "." not in host or not url.startswith("https://"):
                found.append(f"{package} links {label} to {url}, which is no place")
    return found


def licence_faults(root: Path) -> list[str]:
    """Return the packages whose licence is another file than the root's."""
    licence = (root / "LICENSE").read_bytes()
    copies = {package: root / "packages" / package / "LICENSE" for package in PACKAGES}
    return [
        f"{package} has another LICENSE than the root"
        for package, copy in copies.items()
        if copy.read_bytes() != licence
    ]


def main() -> int:
    """Print the faults; return 1 if there is one."""
    found = faults(ROOT)
    print(*(found or ["ready"]), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
