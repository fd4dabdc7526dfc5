"""``bt-width`` and ``python -m bt_width``."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command; argparse is imported only now.

    Ctrl-C and a reader that has gone away end it without a traceback.
    """
    from ._command import main as run

    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
