"""The options that both commands which run an engine have."""

from __future__ import annotations

import argparse

from bt_runner.terminal.values import count


def add_device_options(parser: argparse.ArgumentParser, *, dtype: str) -> None:
    """Add where the engine computes, and in what; ``dtype`` says what it is by default."""
    parser.add_argument("--device", help="cpu, cuda, ... (default: CUDA where there is one)")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        help=f"of weights and caches (default: {dtype})",
    )


def add_limit_options(
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


def add_engine_switches(parser: argparse.ArgumentParser) -> None:
    """Add whether prefixes are cached, and whether the sanitizer is on."""
    parser.add_argument(
        "--no-prefix-caching",
        action="store_true",
        help="compute equal beginnings of texts anew",
    )
    parser.add_argument("--sanitize", action="store_true", help="check every step's tables")
