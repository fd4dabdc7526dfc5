"""``bt-runner`` and ``python -m bt_runner``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code, one of ``bt_width.terminal.ExitCode``."""
    is_ours = argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        # an interrupt within an import is printed in full or hidden as another error
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from bt_runner.cli import run
    from bt_width.terminal import run_guarded

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = run_guarded(lambda: run(sys.argv[1:] if argv is None else argv))
    if is_ours:
        # nothing is left to be told while the interpreter ends
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    sys.exit(main())
