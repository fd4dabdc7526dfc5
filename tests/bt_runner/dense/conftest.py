"""Tests of the dense reference run on one thread."""

from __future__ import annotations

from tests.support.one_thread import one_thread

__all__ = ["one_thread"]
