"""The command line: what can be asked for, and how a failed check, bad input and Ctrl-C end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

import bt_runner
from bt_runner.demo.options import add_options as add_demo_options
from bt_runner.errors import RunnerError, VerificationError
from bt_runner.geometry.options import add_options as add_plan_options
from bt_runner.replay.options import add_options as add_replay_options
from bt_runner.run.options import add_options as add_run_options
from bt_runner.soak.options import add_options as add_soak_options
from bt_tables.sanitizer import BlockTableFaultError
from bt_width import BlockTableError

MISMATCH, BAD_INPUT, INTERRUPTED = 1, 2, 130


class _Command(NamedTuple):
    """One command.

    Attributes:
        module: What runs it, imported only then.
        add_options: Adds its options.
        about: What it does.
        example: How it is called.
    """

    module: str
    add_options: Callable[[argparse.ArgumentParser], None]
    about: str
    example: str


_COMMANDS = {
    "demo": _Command(
        "bt_runner.demo.command",
        add_demo_options,
        "continue real text with the built-in hybrid model, and check every token",
        "bt-runner demo --max-new-tokens 8 --sanitize",
    ),
    "run": _Command(
        "bt_runner.run.command",
        add_run_options,
        "continue text with a Hugging Face checkpoint",
        'bt-runner run --model DIR --prompt "Once upon a time" --drafts 3',
    ),
    "plan": _Command(
        "bt_runner.geometry.command",
        add_plan_options,
        "print the block tables and caches of a published model's config",
        "bt-runner plan --config config.json --max-model-len 131072 --explain",
    ),
    "replay": _Command(
        "bt_runner.replay.command",
        add_replay_options,
        "run a trace of real traffic over a model's block tables, and check them",
        "bt-runner replay trace.csv --config config.json --speculative-tokens 3 --dcp 2",
    ),
    "soak": _Command(
        "bt_runner.soak.command",
        add_soak_options,
        "run random traffic over random block tables for long, and check every step",
        "bt-runner soak --minutes 60",
    ),
}


def run(argv: Sequence[str]) -> int:
    """Parse ``argv``, run the command and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = import_module(_COMMANDS[args.command].module).run(args)
    except (BlockTableFaultError, VerificationError) as error:
        return _end(f"error: {error}", MISMATCH)
    except (RunnerError, BlockTableError) as error:
        return _end(f"error: {error}", BAD_INPUT)
    except KeyboardInterrupt:
        return _end("interrupted", INTERRUPTED)
    return code


def _end(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bt-runner", description="A minimal decode loop over block tables."
    )
    version = f"%(prog)s {bt_runner.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in _COMMANDS.items():
        command.add_options(
            commands.add_parser(
                name,
                help=command.about,
                description=command.about[0].upper() + command.about[1:] + ".",
                epilog=f"example: {command.example}",
            )
        )
    return parser
