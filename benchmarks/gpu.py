"""Everything that needs a GPU: the tests marked ``cuda``, what a step costs, and the demo.

The demo runs with and without CUDA graphs; each time its check is on, and it prints tokens
a second and what the host works on a step. Runs with or without hatch:
``python benchmarks/gpu.py``. Ends within five minutes; without a GPU at once, and well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]


class Part(NamedTuple):
    """One process.

    Attributes:
        module: What ``python -m`` runs, and its arguments.
        seconds: How long it may take.
    """

    module: tuple[str, ...]
    seconds: int


PARTS = (
    Part(("bt_runner", "demo", "--device", "cuda"), 60),
    Part(("bt_runner", "demo", "--device", "cuda", "--graphs"), 60),
    Part(("benchmarks.table_gpu",), 50),
    Part(("pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider"), 120),
)


def main() -> int:
    """Run each part; fail if any does."""
    if not torch.cuda.is_available():
        print("there is no CUDA device: nothing was run and nothing measured")
        return 0
    sources = [str(ROOT), *(str(path) for path in sorted(ROOT.glob("packages/*/src")))]
    environment = dict(os.environ)
    # Triton's own library reads both when it is first imported
    environment["TRITON_INTERPRET"] = "0"
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    environment["PYTHONPATH"] = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
    codes = [_run(part, environment) for part in PARTS]
    return 1 if any(codes) else 0


def _run(part: Part, environment: dict[str, str]) -> int:
    print(f"\n$ {' '.join(part.module)}", flush=True)
    command = [sys.executable, "-m", *part.module]
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, timeout=part.seconds, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"it took longer than {part.seconds} s")
        return 1


if __name__ == "__main__":
    sys.exit(main())
