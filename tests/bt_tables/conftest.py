"""The kernels of tables and of the sanitizer are interpreted."""

from tests.support.interpreted import language_patched_once

__all__ = ["language_patched_once"]
