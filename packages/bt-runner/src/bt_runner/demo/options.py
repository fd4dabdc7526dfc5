"""The options of ``bt-runner demo``."""

from __future__ import annotations

import argparse
from pathlib import Path

from bt_runner.terminal.options import add_device_options, add_engine_switches, add_limit_options
from bt_runner.terminal.values import count, seed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="texts to continue, one a line (default: texts that are installed with Python)",
    )
    parser.add_argument(
        "--max-new-tokens", type=count, default=32, metavar="N", help="per text (default: 32)"
    )
    add_device_options(parser, dtype="float64, where rounding decides nothing")
    parser.set_defaults(dtype="float64")
    parser.add_argument("--seed", type=seed, default=0, help="of the weights (default: 0)")
    add_limit_options(parser, max_model_len="4096", num_blocks="enough")
    parser.add_argument("--graphs", action="store_true", help="capture decode steps (CUDA)")
    add_engine_switches(parser)
    parser.add_argument("--no-check", action="store_true", help="skip the dense reference")
