"""Reads what the environment asks of the checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

from bt_width import InvalidSpecError

Action: TypeAlias = Literal["raise", "log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is checked, and what a finding leads to.

    Attributes:
        every: Check one step in so many.
        action: Whether a finding ends the engine or is written to its log.
        directory: Where a page for each faulty step is written, None for nowhere.
    """

    every: int = 1
    action: Action = "raise"
    directory: Path | None = None


def read_settings(environ: Mapping[str, str]) -> Settings | None:
    """Return the settings, None where checks are not asked for.

    Raises:
        InvalidSpecError: A variable has a value that means nothing.
    """
    switch = environ.get("BT_SANITIZE", "0")
    if switch in ("", "0"):
        return None
    if switch != "1":
        raise InvalidSpecError(f"BT_SANITIZE must be 0 or 1, not {switch!r}")
    every = environ.get("BT_SANITIZE_EVERY", "1")
    if not (every.isascii() and every.isdigit() and len(every) < 10 and int(every)):
        raise InvalidSpecError(f"BT_SANITIZE_EVERY must be a number of at least 1, not {every!r}")
    action = environ.get("BT_SANITIZE_ACTION", "raise")
    if action not in ("raise", "log"):
        raise InvalidSpecError(f"BT_SANITIZE_ACTION must be raise or log, not {action!r}")
    directory = environ.get("BT_SANITIZE_DIR")
    return Settings(
        every=int(every),
        action=cast(Action, action),
        directory=Path(directory) if directory else None,
    )
