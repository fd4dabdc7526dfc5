"""Registers, spills and memory of every table kernel, compiled for GPUs that are not there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.compiled import compile_resources
from tests.support.table_kernels import TABLE_KERNELS


def main() -> int:
    """Print one line a kernel and architecture; fail if any spills."""
    print(f"{'kernel':<20} {'target':<8} registers  spilled bytes  local bytes  stack bytes")
    worst = 0
    for name, found in compile_resources(TABLE_KERNELS).items():
        for usage in found:
            print(
                f"{name:<20} {f'sm_{usage.architecture}':<8} {usage.registers:>9}  "
                f"{usage.spills:>13}  {usage.local:>11}  {usage.stack:>11}"
            )
            worst = max(worst, usage.spills, usage.local)
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main())
