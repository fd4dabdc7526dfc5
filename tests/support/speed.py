"""Processor time in the seconds of one machine, so that limits hold on slower ones too."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# What the machine that the limits were set on takes: a million turns of a plain loop, and the
# import of the standard library's modules that a command line needs.
LOOP_SECONDS = 0.048
IMPORT_SECONDS = 0.05
IMPORTS = [sys.executable, "-c", "import argparse, dataclasses, pathlib, shutil, urllib.parse"]


def slowness() -> float:
    """How many times longer plain Python takes here and now than on that machine; at least 1."""
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        for _ in range(1_000_000):
            pass
        best = min(best, time.process_time() - started)
    return max(1.0, best / LOOP_SECONDS)


def command_seconds(command: Sequence[str], folder: Path) -> float:
    """The least of five processor times of a command, on that machine.

    Python's compiled files are kept in ``folder``, so that all runs but the first have them.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def used(command: Sequence[str]) -> float:
        before = os.times()
        subprocess.run(command, check=True, capture_output=True, timeout=60, env=environment)
        after = os.times()
        seconds = after.children_user - before.children_user
        return seconds + after.children_system - before.children_system

    pairs = [(used(command), used(IMPORTS)) for _ in range(5)]
    slowness = min(imports for _, imports in pairs) / IMPORT_SECONDS
    return min(seconds for seconds, _ in pairs) / max(1.0, slowness)
