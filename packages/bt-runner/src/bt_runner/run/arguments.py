"""The options of ``bt-runner run``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        "--max-new-tokens", type=_positive, default=64, metavar="N", help="per text (default: 64)"
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        help="0 always takes the likeliest (default)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument(
        "--drafts", type=_positive, default=0, metavar="K", help="tokens guessed ahead"
    )
    parser.add_argument("--sanitize", action="store_true", help="check every step's tables")
    parser.add_argument(
        "--interleave",
        type=_positive,
        default=1,
        metavar="N",
        help="consecutive tokens that stay on one rank (default: 1)",
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: CUDA where there is one)")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        help="of weights and caches (default: bfloat16 on CUDA, else float32)",
    )
    parser.add_argument(
        "--max-model-len", type=_positive, metavar="N", help="tokens of a text (default: as needed)"
    )
    parser.add_argument(
        "--num-blocks", type=_positive, metavar="N", help="blocks of each pool (default: as needed)"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0 and finite, not {value}")
    return value
