"""The command line: the commands, their options, and the exit code of each error."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

import bt_runner
from bt_runner.errors import PoolExhaustedError, RankLostError, RunnerError, VerificationError
from bt_runner.replay.options import add_options as add_replay_options
from bt_runner.terminal.options import add_demo_options, add_run_options
from bt_width import BlockTableError
from bt_width.plan.command import ABOUT as ABOUT_PLAN
from bt_width.plan.command import add_options as add_plan_options
from bt_width.plan.options import options_of_fields
from bt_width.terminal import (
    CommandParser,
    ExitCode,
    name_options,
    print_error,
    quiet_interrupts,
)

_OPTIONS_OF_FIELDS = {
    "max_model_len": "--max-model-len",
    "max_num_reqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_new_tokens": "--max-new-tokens",
    "num_speculative_tokens": "--drafts",
    "num_speculative_blocks": "--drafts",
    "context_parallel.interleave": "--interleave",
    "interleave": "--interleave",
    "num_blocks": "--num-blocks",
}
"""The option by which ``demo`` and ``run`` set a field that an error may name."""


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
        "bt_width.plan.command",
        add_plan_options,
        ABOUT_PLAN,
        "bt-runner plan --config config.json --memory 80GiB --tp 8 --at-len 32K",
    ),
    "replay": _Command(
        "bt_runner.replay.command",
        add_replay_options,
        "run a trace of real traffic over a model's block tables, and check them",
        "bt-runner replay trace.csv --config config.json --speculative-tokens 3 --dcp 2",
    ),
}


def run(argv: Sequence[str]) -> int:
    """Parse ``argv``, run the command and return its exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    with quiet_interrupts():
        command = import_module(_COMMANDS[args.command].module)
    try:
        code: int = command.run(args)
    except _mismatches() as error:
        print_error(error)
        return ExitCode.MISMATCH
    except (RankLostError, PoolExhaustedError) as error:
        print_error(error)
        return ExitCode.FAILED
    except (RunnerError, BlockTableError) as error:
        message = name_options(str(error), _option_of_each_field(args))
        if not _is_told_elsewhere(message):
            print_error(message)
        return ExitCode.BAD_INPUT
    return code


def _is_told_elsewhere(message: str) -> bool:
    """Say whether torchrun started several processes, and another one prints the message."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    from bt_runner.processes import is_told_elsewhere

    return is_told_elsewhere(message)


class _Parser(CommandParser):
    """Refuses a wrong command line once, however many processes torchrun started with it."""

    def error(self, message: str) -> NoReturn:
        if _is_told_elsewhere(message):
            raise SystemExit(int(ExitCode.BAD_INPUT))
        super().error(message)


def _mismatches() -> tuple[type[Exception], ...]:
    """Return what a failed check raises; bt_tables is loaded only where something was raised."""
    from bt_tables.sanitizer import BlockTableFaultError

    return (BlockTableFaultError, VerificationError)


def _option_of_each_field(args: argparse.Namespace) -> Mapping[str, str]:
    """Return the option by which this command sets a field that an error may name."""
    if args.command in ("demo", "run"):
        return _OPTIONS_OF_FIELDS
    return {**options_of_fields(args), "num_blocks": "--blocks"}


class _PrintCompletion(argparse.Action):
    """Prints a completion script; shtab is loaded only then.

    A script that was printed once completes without starting Python at each key.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Print the script and exit."""
        import shtab

        print(shtab.complete(parser, shell=str(values)))
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``bt-runner``."""
    parser = _Parser(prog="bt-runner", description="A minimal decode loop over block tables.")
    version = f"%(prog)s {bt_runner.__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script that completes commands and options in this shell",
    )
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
