"""The options of ``bt-runner demo``."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="texts to continue, one a line (default: texts that are installed with Python)",
    )
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=32, metavar="N", help="per text (default: 32)"
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: CUDA where there is one)")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        default="float64",
        help="of weights and caches (default: float64, where rounding decides nothing)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    parser.add_argument(
        "--max-model-len", type=_positive, metavar="N", help="tokens of a text (default: 4096)"
    )
    parser.add_argument(
        "--num-blocks", type=_positive, metavar="N", help="blocks of each pool (default: enough)"
    )
    parser.add_argument(
        "--interleave",
        type=_positive,
        default=1,
        metavar="N",
        help="consecutive tokens that stay on one rank (default: 1)",
    )
    parser.add_argument("--graphs", action="store_true", help="capture decode steps (CUDA)")
    parser.add_argument("--sanitize", action="store_true", help="check every step's tables")
    parser.add_argument("--no-check", action="store_true", help="skip the dense reference")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value
