"""``bt-width plan``: the rows of some groups, printed for a person or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from . import __version__
from ._group_option import PlannedGroup, parse_group
from .capacity import addressable_tokens, index_buffer_bytes, table_bytes, tables_bytes
from .errors import BlockTableError
from .layout import BlockTableLayout
from .limits import ContextParallel, ServingLimits
from .terminal import (
    CommandParser,
    ExitCode,
    format_table,
    name_options,
    print_error,
    print_warning,
)

_GIB = 2**30

OPTIONS = {
    "max_model_len": "--max-model-len",
    "max_num_reqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "num_speculative_tokens": "--speculative-tokens",
    "lookahead_tokens": "--lookahead-tokens",
    "context_parallel.size": "--dcp",
    "context_parallel.interleave": "--interleave",
    "interleave": "--interleave",
}
"""The option that sets each field which an error may name."""

_EXAMPLES = """examples:
  bt-width plan --group attention:64 --max-model-len 350000
  bt-width plan --group attention:640:kernel=128 --group mamba:640:align:3 --group ring:4 \\
      --group window:16:4096 --max-model-len 262144 --speculative-tokens 3 --explain

a group is KIND:BLOCK_SIZE and then
  attention:64[:states=4][:replicated]      window:16:4096 (the window, in tokens)
  mamba:640[:none|align][:SPECULATIVE]      ring:4
attention and window also take kernel=TOKENS and align=TOKENS or align=none."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``bt-width``."""
    parser = CommandParser(
        prog="bt-width", description="Plan block tables without a GPU or a tensor."
    )
    parser.add_argument("--version", action="version", version=f"bt-width {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="print how wide the rows of some cache groups are",
        epilog=_EXAMPLES,
    )
    plan.add_argument(
        "--group", action="append", required=True, metavar="KIND:BLOCK_SIZE[:...]", dest="groups"
    )
    plan.add_argument("--max-model-len", type=int, required=True, metavar="TOKENS")
    plan.add_argument("--dcp", type=int, default=1, metavar="RANKS", help="context-parallel ranks")
    plan.add_argument("--interleave", type=int, default=1, metavar="TOKENS")
    plan.add_argument("--max-num-seqs", type=int, default=256, metavar="REQUESTS")
    plan.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="TOKENS")
    plan.add_argument("--speculative-tokens", type=int, default=0, metavar="TOKENS")
    plan.add_argument("--lookahead-tokens", type=int, default=0, metavar="TOKENS")
    plan.add_argument("--explain", action="store_true", help="say how each width came about")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bt-width``; return 0, or 2 where an argument makes no plan."""
    args = build_parser().parse_args(argv)
    try:
        limits = _limits(args)
        groups = [parse_group(text) for text in args.groups]
        layouts = [_plan(group, limits) for group in groups]
    except BlockTableError as error:
        print_error(name_options(str(error), OPTIONS))
        return ExitCode.BAD_INPUT
    if args.json:
        print(json.dumps(_as_record(layouts), indent=2))
    else:
        print(_as_table(layouts))
        if args.explain:
            print()
            for group, layout in zip(groups, layouts, strict=True):
                print(f"{group.text}: {layout.explain()}")
    for group, layout in zip(groups, layouts, strict=True):
        _warn_if_large(group.text, layout)
    return 0


def _limits(args: argparse.Namespace) -> ServingLimits:
    return ServingLimits(
        max_model_len=args.max_model_len,
        max_num_reqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_speculative_tokens=args.speculative_tokens,
        lookahead_tokens=args.lookahead_tokens,
        context_parallel=ContextParallel(size=args.dcp, interleave=args.interleave),
    )


def _plan(group: PlannedGroup, limits: ServingLimits) -> BlockTableLayout:
    try:
        return BlockTableLayout.plan(group.spec, limits, group.kernel_block_size)
    except BlockTableError as error:
        raise type(error)(f"group {group.text!r}: {error}", **error.facts) from error


def _as_table(layouts: Sequence[BlockTableLayout]) -> str:
    header = (
        "kind",
        "block",
        "kernel block",
        "blocks",
        "width",
        "tokens/row",
        "table bytes",
    )
    return format_table(header, [_cells(layout) for layout in layouts])


def _cells(layout: BlockTableLayout) -> tuple[str, ...]:
    tokens = addressable_tokens(layout)
    return (
        layout.kind,
        f"{layout.block_size:,}",
        f"{layout.kernel_block_size:,}",
        f"{layout.max_num_blocks:,}",
        f"{layout.width:,}",
        "-" if tokens is None else f"{tokens:,}",
        f"{table_bytes(layout):,}",
    )


def _as_record(layouts: Sequence[BlockTableLayout]) -> dict[str, Any]:
    groups = [
        {
            "kind": layout.kind,
            "block_size": layout.block_size,
            "kernel_block_size": layout.kernel_block_size,
            "blocks_per_request": layout.max_num_blocks,
            "width": layout.width,
            "addressable_tokens": addressable_tokens(layout),
            "table_bytes": table_bytes(layout),
            "index_buffer_bytes": index_buffer_bytes(layout),
            "explain": layout.explain(),
            "layout": json.loads(layout.to_json()),
        }
        for layout in layouts
    ]
    return {"groups": groups, "table_bytes": tables_bytes(layouts)}


def _warn_if_large(name: str, layout: BlockTableLayout) -> None:
    sizes = {"table": table_bytes(layout)}
    if layout.kind == "attention":
        sizes["index buffer of a DSA indexer"] = index_buffer_bytes(layout)
    for what, size in sizes.items():
        if size > _GIB:
            print_warning(
                f"{name}: the {what} takes {size / _GIB:.2f} GiB; "
                "lower --max-num-seqs or --max-model-len, or use a larger block"
            )
