"""The four packages as others install them: what a wheel holds, and what it asks for."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from tests.support.source_trees import PACKAGES, ROOT
from tests.support.wheels import build_all, folder_of

pytest.importorskip("hatchling")
requirements = pytest.importorskip("packaging.requirements")

FOLDERS = [folder_of(package) for package in PACKAGES]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of each package, built without a network, by import name."""
    return build_all(tmp_path_factory.mktemp("wheels"), "wheel")


def metadata(wheel: Path) -> Message:
    """The METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def version_of(package: str) -> str:
    """The literal in a package's ``__init__``, read without importing it."""
    path = folder_of(package) / "src" / package / "__init__.py"
    found = re.search(r'^__version__ = "([^"]+)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, path
    return found[1]


def pyproject(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_holds_its_package_and_nothing_else(package: str, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[package]) as archive:
        names = archive.namelist()

    info = f"{package}-{version_of(package)}.dist-info"
    assert {name.partition("/")[0] for name in names} == {package, info}
    assert f"{package}/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    source = folder_of(package) / "src"
    written = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == written


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_says_what_it_is(package: str, wheels: dict[str, Path]) -> None:
    said = metadata(wheels[package])

    assert said["Name"] == package.replace("_", "-")
    assert said["Version"] == version_of(package)
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.11"
    assert said["Summary"]
    assert "Typing :: Typed" in said.get_all("Classifier", [])
    assert said["Description-Content-Type"] == "text/markdown"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_asks_only_for_those_below_it(package: str, wheels: dict[str, Path]) -> None:
    """And for their versions as they are now; by name, never by a path."""
    asked = [
        requirements.Requirement(text)
        for text in metadata(wheels[package]).get_all("Requires-Dist", [])
    ]
    siblings = {r.name.replace("-", "_"): r for r in asked if r.name.replace("-", "_") in PACKAGES}

    assert [r.url for r in asked if r.url] == []
    for sibling, requirement in siblings.items():
        assert PACKAGES.index(sibling) < PACKAGES.index(package)
        assert requirement.specifier.contains(version_of(sibling))
        assert not requirement.specifier.contains("99")


def test_bt_width_asks_for_nothing(wheels: dict[str, Path]) -> None:
    assert metadata(wheels["bt_width"]).get_all("Requires-Dist", []) == []


def test_the_wheel_of_bt_width_imports_on_its_own(wheels: dict[str, Path]) -> None:
    """Without any site-packages, and straight from the file."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import bt_width; "
        "print(bt_width.get_block_table_width(295, 32))"
    )

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(wheels["bt_width"])],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stdout.strip() == "296", done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_an_entry_point_exists(package: str, wheels: dict[str, Path]) -> None:
    """Whatever a wheel promises to start, or gives to vLLM as a plugin, is in it."""
    with zipfile.ZipFile(wheels[package]) as archive:
        (names,) = [
            archive.read(name).decode()
            for name in archive.namelist()
            if name.endswith("entry_points.txt")
        ] or [""]
        modules = {name: archive.read(name).decode() for name in archive.namelist()}

    points = re.findall(r"= ([\w.]+):(\w+)$", names, re.MULTILINE)

    assert len(points) == names.count(" = ")
    assert ("[vllm.general_plugins]" in names) == (package == "bt_tables")
    for module, function in points:
        places = (module.replace(".", "/") + end for end in (".py", "/__init__.py"))
        source = next(modules[place] for place in places if place in modules)
        assert re.search(rf"\b(def|import) .*\b{function}\b", source)


def test_versions_move_in_step() -> None:
    assert len({version_of(package) for package in PACKAGES}) == 1


def test_every_licence_is_the_same_file() -> None:
    """Copies, as a package may not reach outside its folder for one."""
    texts = {(folder / "LICENSE").read_bytes() for folder in [ROOT, *FOLDERS]}

    assert len(texts) == 1


def test_every_package_has_a_readme_and_settings_of_its_own_build_alone() -> None:
    """Tools are configured at the root: a member's own table would hide it."""
    for folder in FOLDERS:
        assert (folder / "README.md").read_text(encoding="utf-8").startswith(f"# {folder.name}\n")
        assert pyproject(folder)["tool"].keys() == {"hatch"}


def test_hatch_knows_every_package() -> None:
    hatch = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))
    members = [f"packages/{folder.name}" for folder in FOLDERS]

    assert hatch["envs"]["default"]["workspace"]["members"] == members
    assert hatch["envs"]["hatch-build"]["workspace"]["members"] == members
    assert {path.parent for path in (ROOT / "packages").glob("*/pyproject.toml")} == set(FOLDERS)


def test_mypy_knows_every_package() -> None:
    settings = (ROOT / "mypy.ini").read_text(encoding="utf-8")

    for folder in FOLDERS:
        assert f"/packages/{folder.name}/src" in settings
