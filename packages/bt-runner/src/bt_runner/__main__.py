"""``bt-runner`` and ``python -m bt_runner``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from bt_width.terminal import quiet_interrupts, run_guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code, one of ``bt_width.terminal.ExitCode``."""

    def command() -> int:
        with quiet_interrupts():
            from bt_runner.cli import run
        return run(sys.argv[1:] if argv is None else argv)

    code = run_guarded(command)
    if argv is None:
        # nothing is left to be told while the interpreter ends
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    sys.exit(main())
