"""``bt-width``: its parser, and how bad input ends."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import __version__
from .errors import BlockTableError
from .plan.command import ABOUT, EXAMPLES, add_options, run
from .plan.options import options_of_fields
from .terminal import CommandParser, ExitCode, name_options, print_error


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``bt-width``."""
    parser = CommandParser(
        prog="bt-width", description="Plan block tables without a GPU or a tensor."
    )
    parser.add_argument("--version", action="version", version=f"bt-width {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    about = f"{ABOUT.capitalize()}."
    add_options(commands.add_parser("plan", help=ABOUT, description=about, epilog=EXAMPLES))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bt-width``; return 0, or 2 where an argument or a config makes no plan."""
    args = build_parser().parse_args(argv)
    try:
        return run(args)
    except BlockTableError as error:
        print_error(name_options(str(error), options_of_fields(args)))
        return ExitCode.BAD_INPUT
