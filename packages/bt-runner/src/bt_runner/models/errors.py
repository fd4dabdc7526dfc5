"""What is wrong with a model before it runs: its numbers or its files."""

from __future__ import annotations

from bt_width.errors import BlockTableError


class ModelConfigError(BlockTableError):
    """A model's configuration is inconsistent, or asks for what is not built here."""


class CheckpointError(BlockTableError):
    """A checkpoint's files do not hold the tensors its configuration calls for."""
