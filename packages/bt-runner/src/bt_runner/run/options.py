"""The options of ``bt-runner run``."""

from __future__ import annotations

import argparse
from pathlib import Path

from bt_runner.terminal.options import add_device_options, add_engine_switches, add_limit_options
from bt_runner.terminal.values import count, seed, temperature


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="config.json, *.safetensors and tokenizer.json",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="a text to continue")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="several, one a line")
    parser.add_argument(
        "--max-new-tokens", type=count, default=64, metavar="N", help="per text (default: 64)"
    )
    parser.add_argument(
        "--temperature",
        type=temperature,
        default=0.0,
        help="0 always takes the likeliest (default)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the draws (default: 0)")
    parser.add_argument(
        "--drafts", type=count, default=0, metavar="K", help="tokens guessed ahead (default: none)"
    )
    add_engine_switches(parser)
    add_device_options(parser, dtype="bfloat16 on CUDA, else float32")
    add_limit_options(parser, max_model_len="as needed", num_blocks="as needed")
