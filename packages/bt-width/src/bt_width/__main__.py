"""``bt-width`` and ``python -m bt_width``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code, one of ``bt_width.terminal.ExitCode``."""
    from .terminal import run_guarded

    def command() -> int:
        from ._command import main as run

        return run(argv)

    code = run_guarded(command)
    if argv is None:
        # nothing is left to be told while the interpreter ends
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    sys.exit(main())
