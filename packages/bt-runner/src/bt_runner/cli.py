"""The command line: what can be asked for, and how errors and Ctrl-C end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bt_runner.errors import RunnerError
from bt_runner.geometry.arguments import add_arguments as add_plan_arguments
from bt_runner.replay.arguments import add_arguments as add_replay_arguments
from bt_runner.run.arguments import add_arguments as add_run_arguments
from bt_tables.sanitizer import BlockTableFaultError
from bt_width import BlockTableError

OK, MISMATCH, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

_PIPE_WIDTH = 100

DTYPES = ("float64", "float32", "bfloat16")


def run(argv: Sequence[str]) -> int:
    """Parse ``argv``, run the command and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        return _run_command(args)
    except BlockTableFaultError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISMATCH
    except (RunnerError, BlockTableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run_command(args: argparse.Namespace) -> int:
    match args.command:
        case "plan":
            from bt_runner.geometry.command import run as run_plan

            return run_plan(args)
        case "run":
            from bt_runner.run.command import run as run_text

            return run_text(args)
        case "replay":
            from bt_runner.replay.command import run as run_replay

            return run_replay(args)
        case _:
            return _run_demo(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bt-runner", description="A minimal decode loop over block tables."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="continue real text with the built-in hybrid model, and check every token",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--prompts", type=Path, metavar="FILE", help="texts to continue, one a line")
    demo.add_argument("--max-new-tokens", type=_positive, default=32, metavar="N")
    demo.add_argument("--device", help="cpu, cuda, ...; CUDA where there is one")
    demo.add_argument("--dtype", choices=DTYPES, default="float64")
    demo.add_argument("--seed", type=int, default=0, help="of the model's weights")
    demo.add_argument("--max-model-len", type=_positive, metavar="N", help="tokens of a request")
    demo.add_argument("--num-blocks", type=_positive, metavar="N", help="blocks of each pool")
    demo.add_argument(
        "--interleave", type=_positive, default=1, metavar="N", help="tokens that stay on a rank"
    )
    demo.add_argument("--graphs", action="store_true", help="capture decode steps (CUDA)")
    demo.add_argument("--sanitize", action="store_true", help="check every step's tables")
    demo.add_argument("--no-check", action="store_true", help="skip the dense reference")
    text = commands.add_parser("run", help="continue text with a Hugging Face checkpoint")
    add_run_arguments(text)
    plan = commands.add_parser(
        "plan", help="print the block tables and caches of a published model's config"
    )
    add_plan_arguments(plan)
    replay = commands.add_parser(
        "replay", help="run a trace of real traffic over a model's block tables, and check them"
    )
    add_replay_arguments(replay)
    return parser


def _run_demo(args: argparse.Namespace) -> int:
    import torch

    from bt_runner.demo.main import DemoOptions, run_demo

    options = DemoOptions(
        prompts=args.prompts,
        max_new_tokens=args.max_new_tokens,
        device=args.device,
        dtype=args.dtype,
        seed=args.seed,
        max_model_len=args.max_model_len,
        num_blocks=args.num_blocks,
        checks=not args.no_check,
        interleave=args.interleave,
        uses_graphs=args.graphs,
        sanitizes=args.sanitize,
    )
    # the demo's tensors are small: more threads would wait for each other longer than they work
    torch.set_num_threads(1)
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return OK if run_demo(options, console) else MISMATCH


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value
