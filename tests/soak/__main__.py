"""``python -m tests.soak``."""

import sys

from tests.soak.command import main

if __name__ == "__main__":
    sys.exit(main())
