"""The four packages built, and installed in environments of their own; no network."""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.support.source_trees import PACKAGES, ROOT


def folder_of(package: str) -> Path:
    """The folder of a package's pyproject."""
    return ROOT / "packages" / package.replace("_", "-")


def build(source: Path, target: Path, kind: str) -> Path:
    """Build a ``wheel`` or an ``sdist`` of a source folder into a folder of its own."""
    target.mkdir(parents=True)
    run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)], cwd=source)
    (built,) = target.iterdir()
    return built


def build_all(target: Path, kind: str) -> dict[str, Path]:
    """Every package built, by import name."""
    return {package: build(folder_of(package), target / package, kind) for package in PACKAGES}


def install(folder: Path, wheels: Sequence[Path], *, beside_torch: bool) -> Path:
    """Make an environment with these wheels and nothing else; return its Python.

    Args:
        folder: Where.
        wheels: What.
        beside_torch: Let it find the modules of this environment, too: torch, but not the
            packages installed for development, whose own path files are not read there.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-index", "--no-deps", *map(str, wheels)])
    if beside_torch:
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(command: Sequence[str], *, cwd: Path | None = None) -> str:
    """Run a command that must succeed; return what it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
