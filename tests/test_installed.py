"""Each package installed from its wheel, as others get it, does what its README shows."""

import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.pages import as_program
from tests.support.source_trees import PACKAGES
from tests.support.wheels import build, build_all, folder_of, install, run

import bt_width

pytest.importorskip("hatchling")
pytest.importorskip("pip")

FOUND = """
import importlib.metadata, importlib.resources, json, {package}
print("found", json.dumps(dict(
    file={package}.__file__,
    typed=importlib.resources.files({package}).joinpath("py.typed").is_file(),
    version={package}.__version__,
    metadata=importlib.metadata.version("{package}"),
)))
"""


class Installed(NamedTuple):
    """What a package did where it was installed, beside what its README shows."""

    python: Path
    program: str
    shown: str
    printed: str
    found: dict[str, Any]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_all(tmp_path_factory.mktemp("wheels"), "wheel")


@pytest.fixture(scope="module")
def pythons(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An environment for each package: its wheel and those of the packages below it.

    bt-width's is really empty; the others stand beside this environment's torch.
    """
    folder = tmp_path_factory.mktemp("environments")
    made = {}
    for number, package in enumerate(PACKAGES):
        needed = [wheels[below] for below in PACKAGES[: number + 1]]
        made[package] = install(folder / package, needed, beside_torch=number > 0)
    return made


@pytest.fixture(scope="module", params=PACKAGES)
def installed(
    request: pytest.FixtureRequest,
    pythons: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Installed:
    """A package's README run where only its wheel is; one process, as torch imports slowly."""
    package: str = request.param
    program, shown = as_program((folder_of(package) / "README.md").read_text(encoding="utf-8"))
    script = tmp_path_factory.mktemp("readme") / "readme.py"
    script.write_text(program + FOUND.format(package=package), encoding="utf-8")
    printed, _, found = run([str(pythons[package]), "-I", str(script)]).rpartition("found ")
    return Installed(pythons[package], program, shown, printed, json.loads(found))


def test_an_installed_package_does_what_its_readme_shows(installed: Installed) -> None:
    assert installed.program
    assert installed.printed == installed.shown


def test_an_installed_package_is_the_wheels(installed: Installed) -> None:
    """And not the one installed for development, or the test above would show nothing."""
    assert Path(installed.found["file"]).is_relative_to(installed.python.parents[1])


def test_an_installed_package_is_typed_and_versioned(installed: Installed) -> None:
    assert installed.found["typed"]
    assert installed.found["version"] == installed.found["metadata"]


def test_the_environment_of_bt_width_has_nothing_else(pythons: dict[str, Path]) -> None:
    program = (
        "import importlib.metadata as m; print([d.metadata['Name'] for d in m.distributions()])"
    )

    assert run([str(pythons["bt_width"]), "-I", "-c", program]) == "['bt-width']\n"


def test_the_installed_command_says_its_version(pythons: dict[str, Path]) -> None:
    said = run([str(pythons["bt_width"].parent / "bt-width"), "--version"])

    assert said == f"bt-width {bt_width.__version__}\n"


@pytest.mark.parametrize("package", PACKAGES)
def test_an_sdist_builds_the_same_wheel(package: str, tmp_path: Path) -> None:
    """Byte for byte, so that nothing is missing from it."""
    wheel = build(folder_of(package), tmp_path / "from tree", "wheel")
    sdist = build(folder_of(package), tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()

    again = build(source, tmp_path / "from sdist", "wheel")

    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    """Every file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
