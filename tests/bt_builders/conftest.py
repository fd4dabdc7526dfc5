"""The kernels of builders are interpreted."""

from tests.support.interpreted import language_patched_once

__all__ = ["language_patched_once"]
