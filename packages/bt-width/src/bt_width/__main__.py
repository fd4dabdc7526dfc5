"""``bt-width`` and ``python -m bt_width``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command; argparse is imported only now."""
    from ._command import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
