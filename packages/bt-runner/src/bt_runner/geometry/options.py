"""The options that say which model is planned, for which limits, and how its caches are cut."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bt-runner plan``."""
    add_geometry_options(parser)
    parser.add_argument("--explain", action="store_true", help="say how each width came about")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_geometry_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="a Hugging Face config.json"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="the longest request (default: the config's max_position_embeddings)",
    )
    limits.add_argument("--max-num-seqs", type=int, default=256, metavar="REQUESTS")
    limits.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="TOKENS")
    limits.add_argument("--speculative-tokens", type=int, default=0, metavar="TOKENS")
    limits.add_argument("--lookahead-tokens", type=int, default=0, metavar="TOKENS")
    limits.add_argument(
        "--dcp", type=int, default=1, metavar="RANKS", help="context-parallel ranks"
    )
    limits.add_argument("--dcp-rank", type=int, default=0, metavar="RANK", help="this rank")
    limits.add_argument("--interleave", type=int, default=1, metavar="TOKENS")
    cut = parser.add_argument_group("blocks")
    cut.add_argument("--block-size", type=int, default=64, metavar="TOKENS")
    cut.add_argument(
        "--kernel-block-size",
        type=int,
        metavar="TOKENS",
        help="the only size that attention kernels take (default: any)",
    )
    cut.add_argument(
        "--mamba-block-size",
        type=int,
        metavar="TOKENS",
        help="tokens between two kept states (default: --block-size)",
    )
    cut.add_argument("--mamba-mode", choices=("none", "align"), default="none")
    cut.add_argument(
        "--cache-dtype", metavar="DTYPE", help="of keys, values and latents (default: the model's)"
    )
