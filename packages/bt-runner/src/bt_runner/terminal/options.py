"""The options of ``demo`` and ``run``, and what the text of a number may be."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from bt_width.errors import shown
from bt_width.plan.sizes import parse_bytes

_MAX_DIGITS = 40


def count(text: str) -> int:
    """Return a whole number of at least 1, or refuse the text."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {shown(text)}")
    return value


def seed(text: str) -> int:
    """Return a whole number of at least 0, or refuse the text."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {shown(text)}")
    return int(text)


def measure(text: str) -> float:
    """Return a finite number above 0, or refuse the text."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, not {shown(text)}")
    return value


def share(text: str) -> float:
    """Return a number from 0 to 1, or refuse the text."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must lie in 0..1, not {shown(text)}")
    return value


def temperature(text: str) -> float:
    """Return a finite number of at least 0, or refuse the text."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0 and finite, not {shown(text)}")
    return value


def _number(text: str) -> float:
    """Return the number, or NaN, which lies in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``demo``."""
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="texts to continue, one a line (default: texts that are installed with Python)",
    )
    parser.add_argument(
        "--max-new-tokens", type=count, default=32, metavar="N", help="per text (default: 32)"
    )
    _add_device_options(parser, dtype="float64, where rounding decides nothing")
    parser.set_defaults(dtype="float64")
    parser.add_argument("--seed", type=seed, default=0, help="of the weights (default: 0)")
    _add_limit_options(parser, max_model_len="4096", num_blocks="enough")
    parser.add_argument("--graphs", action="store_true", help="capture decode steps (CUDA)")
    _add_engine_switches(parser)
    parser.add_argument("--no-check", action="store_true", help="skip the dense reference")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
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
    _add_engine_switches(parser)
    _add_device_options(parser, dtype="bfloat16 on CUDA, else float32")
    _add_limit_options(parser, max_model_len="as needed", num_blocks="as needed")


def _add_device_options(parser: argparse.ArgumentParser, *, dtype: str) -> None:
    """Add where the engine computes, and in what; ``dtype`` says what it is by default."""
    parser.add_argument("--device", help="cpu, cuda, ... (default: CUDA where there is one)")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        help=f"of weights and caches (default: {dtype})",
    )


def _add_limit_options(
    parser: argparse.ArgumentParser, *, max_model_len: str, num_blocks: str
) -> None:
    """Add what is served, and on how many ranks; the words say what the two are by default."""
    parser.add_argument(
        "--max-model-len",
        type=count,
        metavar="N",
        help=f"tokens of a text (default: {max_model_len})",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=count,
        default=8,
        metavar="N",
        help="texts that are continued at a time (default: 8)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=count,
        default=512,
        metavar="N",
        help="tokens of a step, drafts included (default: 512)",
    )
    parser.add_argument(
        "--num-blocks", type=count, metavar="N", help=f"blocks of each pool (default: {num_blocks})"
    )
    parser.add_argument(
        "--interleave",
        type=count,
        default=1,
        metavar="N",
        help="consecutive tokens that stay on one rank (default: 1)",
    )


def _add_engine_switches(parser: argparse.ArgumentParser) -> None:
    """Add whether prefixes are cached, a layer's memory, and whether the sanitizer is on."""
    parser.add_argument(
        "--no-prefix-caching",
        action="store_true",
        help="compute equal beginnings of texts anew",
    )
    parser.add_argument(
        "--workspace",
        type=parse_bytes,
        # of memory, which would bring torch along
        default="256MiB",
        metavar="BYTES",
        help="for a layer's temporary tensors; what needs more is done in pieces "
        "(default: %(default)s)",
    )
    parser.add_argument("--sanitize", action="store_true", help="check every step's tables")
