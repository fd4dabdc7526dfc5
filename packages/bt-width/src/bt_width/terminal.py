"""What the commands share: how they end, how they report errors, and tables that fit the screen."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, NoReturn

_MAX_ECHO = 500
_OUTPUT_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class ExitCode(IntEnum):
    """How a command ends.

    Attributes:
        OK: All is well.
        MISMATCH: A check found a difference, and nothing else has this code.
        BAD_INPUT: An argument or a file cannot be used.
        FAILED: The command could not finish: a full disk, a lost rank, no memory, a bug.
        INTERRUPTED: Ctrl-C, as shells number it.
        READER_GONE: What reads the output closed it, as shells number it.
    """

    OK = 0
    MISMATCH = 1
    BAD_INPUT = 2
    FAILED = 3
    INTERRUPTED = 128 + signal.SIGINT
    READER_GONE = 128 + 13


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors have the commands' one prefix and whose help names defaults."""

    def __init__(self, **settings: object) -> None:
        """Take what ``argparse.ArgumentParser`` takes, with this class's form of help."""
        settings.setdefault("formatter_class", CommandHelp)
        super().__init__(**settings)  # type: ignore[arg-type]  # argparse checks its own settings

    def error(self, message: str) -> NoReturn:
        """Print the usage and one error line, then exit with ``BAD_INPUT``."""
        self.print_usage(sys.stderr)
        # argparse echoes what was typed, however long
        cut = len(message) > _MAX_ECHO
        print_error(f"{message[:_MAX_ECHO]} ..." if cut else message)
        raise SystemExit(int(ExitCode.BAD_INPUT))

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own loses the text where the disk is full
        if file is not None and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


class CommandHelp(argparse.RawDescriptionHelpFormatter):
    """Adds an option's default to its help where the words do not name it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        is_silent = action.default in (None, False, argparse.SUPPRESS) or not action.option_strings
        if is_silent or "default" in text:
            return text
        return f"{text} (default: %(default)s)".lstrip()


def run_guarded(command: Callable[[], int]) -> int:
    """Run a command to its exit code; no way to end prints a traceback, except a bug.

    ``SystemExit``, which argparse raises after it printed help or an error, passes through
    once the output is written.
    """
    try:
        try:
            code = command()
        except SystemExit:
            _flush()
            raise
        _flush()
    except KeyboardInterrupt:
        print_line("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return ExitCode.READER_GONE
    except OSError as error:
        if not _explain(error):
            return _report_bug()
        return ExitCode.FAILED
    except MemoryError as error:
        print_error(f"out of memory{f': {error}' if str(error) else ''}")
        return ExitCode.FAILED
    except Exception:
        return _report_bug()
    return code


@contextmanager
def quiet_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process at once, as long as there is nothing to be told.

    Imports of large libraries take seconds, and a ``KeyboardInterrupt`` inside one is printed
    in full or hidden as another error.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def print_error(message: object) -> None:
    """Print an error in the form that all commands have."""
    print_line(f"error: {message}")


def print_warning(message: object) -> None:
    """Print a warning in the form that all commands have."""
    print_line(f"warning: {message}")


def print_line(text: str) -> None:
    """Print a line to standard error; where that is closed, it is lost."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def name_options(message: str, options: Mapping[str, str]) -> str:
    """Return ``message`` with fields replaced by the options that set them.

    Args:
        message: An error's text, which names fields such as ``max_num_reqs``.
        options: The option of each field.
    """
    for field in sorted(options, key=len, reverse=True):
        message = re.sub(rf"(?<![\w.-]){re.escape(field)}(?![\w.])", options[field], message)
    return message


def screen_width() -> int:
    """Return the columns of the terminal; 80 in a pipe, or what ``COLUMNS`` says."""
    return shutil.get_terminal_size((80, 24)).columns


def format_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    num_texts: int = 1,
    width: int | None = None,
) -> str:
    """Return a table, or one block of lines a row where the table is wider than the screen.

    No cell is ever cut.

    Args:
        header: The columns' headings.
        rows: The cells.
        num_texts: Leading columns that hold texts and stand left; the others stand right.
        width: Columns of the screen; by default the terminal's.
    """
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    if sum(widths) + 2 * (len(widths) - 1) <= (screen_width() if width is None else width):
        return "\n".join(
            "  ".join(
                cell.ljust(size) if column < num_texts else cell.rjust(size)
                for column, (cell, size) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        )
    indent = max(map(len, header[1:]), default=0)
    blocks = []
    for first, *others in rows:
        pairs = zip(header[1:], others, strict=True)
        blocks.append("\n".join([first, *(f"  {name:{indent}}  {cell}" for name, cell in pairs)]))
    return "\n".join(blocks)


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _explain(error: OSError) -> bool:
    """Print one line about a file or an output that failed; False where it was neither."""
    if error.filename is not None:
        print_error(f"{error.filename}: {error.strerror}")
        return True
    if error.errno in _OUTPUT_FAULTS:
        print_error(f"cannot write the output: {error.strerror}")
        _discard_output()
        return True
    return False


def _discard_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter's end cannot fail on it."""
    with suppress(AttributeError, OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _report_bug() -> ExitCode:
    print_line(traceback.format_exc().rstrip())
    print_error("this is a bug: please report the lines above")
    return ExitCode.FAILED
