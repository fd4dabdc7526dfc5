"""Reads a config.json, with bounds on what a broken or hostile file may cost."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from ..errors import InvalidSpecError, shown

MAX_CONFIG_BYTES = 16 * 2**20
"""The largest config; published ones take a few thousand bytes."""


def read_config(path: Path) -> dict[str, Any]:
    """Return a config, given its file or the folder that it lies in.

    Raises:
        InvalidSpecError: It cannot be read, is too large, or is not a JSON object.
    """
    try:
        if path.is_dir():
            path = path / "config.json"
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidSpecError(f"{path} is not a regular file", path=str(path))
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidSpecError):
            raise
        # a ValueError is a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidSpecError(
            f"cannot read {shown(str(path))}: {reason}", path=str(path)
        ) from error
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidSpecError(
            f"{path} is larger than {MAX_CONFIG_BYTES:,} bytes, which no config is", path=str(path)
        )
    return parse_config(text, str(path))


def parse_config(text: bytes, source: str) -> dict[str, Any]:
    """Return the config that ``text`` is.

    Raises:
        InvalidSpecError: It is not a JSON object, or a key occurs twice.
    """
    try:
        config = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_without_duplicates)
    except InvalidSpecError as error:
        raise InvalidSpecError(f"{source}: {error}", **error.details) from error
    except RecursionError:
        raise InvalidSpecError(f"{source} is nested too deeply", path=source) from None
    except ValueError as error:
        raise InvalidSpecError(f"{source} is not JSON: {error}", path=source) from error
    if not isinstance(config, dict):
        raise InvalidSpecError(f"{source} is not a JSON object", path=source)
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidSpecError(f"the key {shown(name)} occurs twice", key=name)
            seen.add(name)
    return record
