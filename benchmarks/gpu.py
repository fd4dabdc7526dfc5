"""Everything that needs a GPU: the tests marked ``cuda``, then what a step costs there.

Runs with or without hatch: ``python benchmarks/gpu.py``. Ends within five minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = (
    (("pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider"), 200),
    (("benchmarks.table_gpu",), 90),
)


def main() -> int:
    """Run each part in a process of its own; fail if any does."""
    sources = [str(ROOT), *(str(path) for path in sorted(ROOT.glob("packages/*/src")))]
    surroundings = dict(os.environ)
    # Triton's own library reads both when it is first imported
    surroundings["TRITON_INTERPRET"] = "0"
    surroundings.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    surroundings["PYTHONPATH"] = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
    worst = 0
    for module, timeout_s in PARTS:
        try:
            finished = subprocess.run(
                [sys.executable, "-m", *module],
                cwd=ROOT,
                env=surroundings,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"{module[0]} took longer than {timeout_s} s")
            worst = max(worst, 1)
        else:
            worst = max(worst, abs(finished.returncode))
    return worst


if __name__ == "__main__":
    sys.exit(main())
