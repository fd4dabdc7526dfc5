"""The options of ``bt-runner soak``."""

from __future__ import annotations

import argparse

from bt_runner.terminal.values import count, measure


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--minutes", type=measure, default=5.0, metavar="N", help="how long (default: 5)"
    )
    parser.add_argument(
        "--steps",
        type=count,
        default=200,
        metavar="STEPS",
        help="of a scenario before the next one is drawn (default: 200)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument(
        "--first-scenario",
        type=count,
        default=1,
        metavar="N",
        help="begin with this one, to see a finding again (default: 1)",
    )
    parser.add_argument(
        "--max-growth",
        type=measure,
        default=2.0,
        metavar="PERCENT",
        help="by which resident memory may grow after the warm-up (default: 2)",
    )
    parser.add_argument("--device", default="cpu", help="where the tables lie (default: cpu)")
