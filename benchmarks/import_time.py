"""How long ``import bt_width`` takes, told by ``python -X importtime`` in fresh interpreters.

It prints and asserts nothing.
"""

import itertools
import platform
import re
import statistics
import subprocess
import sys
from typing import NamedTuple

RUNS = 10
LINE = re.compile(r"^import time:\s+(\d+) \|\s+(\d+) \| (\s*)(\S+)$", re.MULTILINE)


class Import(NamedTuple):
    """One module's import, in microseconds: by itself, and with what it imports first."""

    name: str
    own_us: int
    total_us: int


def import_once(package: str) -> list[Import]:
    """What importing a package imports, the package itself first.

    A module is printed after those that it imports, which are indented further; what the
    interpreter imports on its own stands before them, and is left out.
    """
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {package}"],
        capture_output=True,
        text=True,
        check=True,
    )
    last, *before = reversed(LINE.findall(done.stderr))
    inside = itertools.takewhile(lambda line: len(line[2]) > len(last[2]), before)
    return [Import(name, int(own), int(total)) for own, total, _, name in [last, *inside]]


def main() -> None:
    print(f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}")
    runs = [import_once("bt_width") for _ in range(RUNS)]
    totals = [run[0].total_us / 1000 for run in runs]
    print(
        f"import bt_width: median {statistics.median(totals):.1f} ms, "
        f"fastest {min(totals):.1f} ms, slowest {max(totals):.1f} ms, {RUNS} runs"
    )
    print("the five dearest modules of the last run, each by itself:")
    for entry in sorted(runs[-1], key=lambda entry: -entry.own_us)[:5]:
        print(f"  {entry.own_us / 1000:6.1f} ms  {entry.name}")


if __name__ == "__main__":
    main()
