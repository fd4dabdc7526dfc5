"""The options of ``bt-runner replay``."""

from __future__ import annotations

import argparse
from pathlib import Path

from bt_runner.terminal.options import count, measure, seed, share
from bt_width.plan.options import add_model_options


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="CSV with named columns (Azure's, BurstGPT's) or of prompt and output tokens, or "
        "JSON (Mooncake's); .gz as well",
    )
    add_model_options(parser)
    replay = parser.add_argument_group("replay")
    replay.add_argument(
        "--max-requests",
        type=count,
        metavar="REQUESTS",
        help="stop reading the trace after so many (default: read all)",
    )
    replay.add_argument(
        "--hash-tokens",
        type=count,
        metavar="N",
        help="prompt tokens that a hash id of the trace names (default: what fits all requests)",
    )
    replay.add_argument(
        "--time-unit",
        choices=("s", "ms"),
        help="of times that are numbers (default: ms in JSON and in columns named so, else s)",
    )
    replay.add_argument(
        "--arrivals",
        choices=("asap", "trace"),
        default="asap",
        help="a request enters as soon as there is room (default), or at the trace's time",
    )
    replay.add_argument(
        "--step-ms",
        type=measure,
        default=25.0,
        metavar="MS",
        help="what a step takes, with --arrivals trace (default: 25)",
    )
    replay.add_argument(
        "--blocks",
        type=count,
        nargs="+",
        metavar="BLOCKS",
        help="of the pool, or of each group's (default: what running requests need on average)",
    )
    replay.add_argument(
        "--acceptance",
        type=share,
        default=0.7,
        metavar="SHARE",
        help="the share of drafts that turn out right (default: 0.7)",
    )
    replay.add_argument("--seed", type=seed, default=0, help="of the drafts' fate")
    replay.add_argument(
        "--verify-every",
        type=count,
        default=100,
        metavar="STEPS",
        help="compare every row and slot with the contract so often (default: 100)",
    )
    replay.add_argument(
        "--sanitize", action="store_true", help="let the sanitizer check every step's tables"
    )
    replay.add_argument("--device", default="cpu", help="where the tables lie (default: cpu)")
    replay.add_argument("--strict", action="store_true", help="a malformed line ends the run")
    replay.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also write the run as a page of charts, FILE.html (default: none)",
    )
    replay.add_argument("--json", action="store_true", help="print the summary as one JSON object")
