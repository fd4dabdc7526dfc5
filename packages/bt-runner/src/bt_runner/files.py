"""Reads the user's files: regular ones alone, and no more of them than was expected."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from bt_runner.errors import BadInputError


def open_file(path: Path, *, what: str = "") -> BinaryIO:
    """Open a regular file; a FIFO would wait for a writer, and a device may never end.

    Args:
        path: The file.
        what: What it holds, for the error: "prompts from ", "the trace ".

    Raises:
        BadInputError: It is not there, not readable or not a regular file.
    """
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
        if is_regular:
            return path.open("rb")
        reason: object = "it is not a regular file; write what it gives to one first"
    except OSError as error:
        reason = error.strerror
    except ValueError as error:
        # a NUL in the name
        reason = error
    raise BadInputError(f"cannot read {what}{_named(path)}: {reason}", path=str(path))


def read_file(path: Path, *, max_bytes: int, what: str = "") -> bytes:
    """Return what a regular file holds.

    Args:
        path: The file.
        max_bytes: The most it may hold.
        what: What it holds, for the error.

    Raises:
        BadInputError: As for ``open_file``, or it holds more than ``max_bytes``.
    """
    with open_file(path, what=what) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise BadInputError(
                f"cannot read {what}{_named(path)}: it holds {size:,} bytes, and at most "
                f"{max_bytes:,} are read",
                path=str(path),
                num_bytes=size,
                max_bytes=max_bytes,
            )
        try:
            return file.read(max_bytes)
        except OSError as error:
            raise BadInputError(
                f"cannot read {what}{_named(path)}: {error.strerror}", path=str(path)
            ) from error


def _named(path: Path) -> str:
    """Return the path, its middle left out where it is long, and on one line."""
    name = str(path)
    if not name.isprintable():
        name = ascii(name)
    return name if len(name) <= 300 else f"{name[:140]}...{name[-140:]}"
