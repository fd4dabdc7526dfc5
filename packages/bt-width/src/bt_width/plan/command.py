"""``bt-width plan``, which ``bt-runner plan`` is too: options, plan, then text or JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from ..capacity import tables_bytes
from ..errors import BlockTableError, InvalidSpecError
from ..layout import BlockTableLayout
from ..limits import ServingLimits
from ..models.caches import KeyValueCache
from ..models.model import ModelCaches
from ..picture import draw_rows
from ..terminal import print_warning
from .group_option import GroupOption, parse_group
from .memory import Capacity, fit, longest_that_fits
from .options import (
    add_cut_options,
    add_limit_options,
    groups_of,
    limits_of,
    longest_of,
    model_of,
    plan_groups,
)
from .planned import PlannedGroup
from .sizes import parse_bytes, parse_tokens
from .text import explain_model, large_buffers, show_capacity, show_groups, show_model

ABOUT = "print the block tables and caches of a published model, and what fits into memory"

EXAMPLES = """examples:
  bt-width plan --config config.json --max-model-len 128K --explain
  bt-width plan --config config.json --memory 80GiB --tp 8 --at-len 32K
  bt-width plan --group attention:640:kernel=128 --group mamba:640:align:3 --group ring:4 \\
      --group window:16:4096 --max-model-len 262144 --speculative-tokens 3 --explain

a group is KIND:BLOCK_SIZE and then
  attention:64[:states=4][:replicated]      window:16:4096 (the window, in tokens)
  mamba:640[:none|align][:SPECULATIVE]      ring:4
attention and window also take kernel=TOKENS and align=TOKENS or align=none."""


class Plan(NamedTuple):
    """All that is printed.

    Attributes:
        groups: The planned groups.
        model: The model, where a config was given.
        capacity: What fits, where a memory was given.
    """

    groups: tuple[PlannedGroup, ...]
    model: ModelCaches | None = None
    capacity: Capacity | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--config", type=Path, metavar="FILE", help="a Hugging Face config.json, or its folder"
    )
    what.add_argument(
        "--group",
        action="append",
        metavar="KIND:BLOCK_SIZE[:...]",
        dest="groups",
        help="a cache group instead of a model's; may be given several times",
    )
    add_limit_options(parser)
    add_cut_options(parser)
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--memory",
        type=parse_bytes,
        metavar="BYTES",
        help="for the caches of each GPU, such as 80GiB: also print what fits into it "
        "(default: none)",
    )
    memory.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="RANKS",
        help="tensor-parallel ranks; all bytes are one rank's (default: 1)",
    )
    memory.add_argument(
        "--pp", type=int, default=1, metavar="STAGES", help="pipeline stages (default: 1)"
    )
    memory.add_argument(
        "--at-len",
        type=parse_tokens,
        metavar="TOKENS",
        help="count requests of this length (default: the longest request)",
    )
    parser.add_argument(
        "--explain", action="store_true", help="say how each number came about (default: off)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="also draw one request's rows, to scale, into this file (default: none)",
    )


def run(args: argparse.Namespace) -> int:
    """Plan and print; return 0.

    Raises:
        UnknownModelError: What the model keeps is not certain.
        InvalidSpecError: The config or an option is wrong.
    """
    plan = plan_model(args) if args.groups is None else _plan_given_groups(args)
    if args.svg is not None:
        picture = draw_rows([(group.name, group.layout) for group in plan.groups])
        args.svg.write_text(picture, encoding="utf-8")
    print(json.dumps(_record(plan), indent=2) if args.json else _text(args, plan))
    for warning in large_buffers(plan.groups):
        print_warning(warning)
    return 0


def plan_model(args: argparse.Namespace) -> Plan:
    """Return the plan of the model that ``args.config`` names.

    Raises:
        UnknownModelError: What the model keeps is not certain.
        InvalidSpecError: The config or an option is wrong.
    """
    model = model_of(args)
    _require_shared_heads(args, model)
    groups = groups_of(args, model, tp=args.tp)
    planned = plan_groups(args, groups, limits_of(args, longest_of(args, model)))
    if args.memory is None:
        if args.at_len is not None:
            raise InvalidSpecError("--at-len needs --memory", option="--at-len")
        return Plan(planned, model)
    if args.max_model_len == "auto":
        longest = longest_that_fits(planned, args.memory, args.pp)
        planned = plan_groups(args, groups, limits_of(args, longest))
    return Plan(planned, model, fit(planned, args.memory, at_len=args.at_len, pp=args.pp))


def _require_shared_heads(args: argparse.Namespace, model: ModelCaches) -> None:
    """Refuse context parallelism over ranks that keep different heads."""
    if args.dcp <= 1 or args.tp <= 1:
        return
    if args.tp % args.dcp:
        raise InvalidSpecError(
            f"--dcp {args.dcp} must divide --tp {args.tp}: context-parallel ranks are "
            "tensor-parallel ranks that keep the same heads",
            dcp=args.dcp,
            tp=args.tp,
        )
    for layer in model.layers:
        for cache in layer:
            if not isinstance(cache, KeyValueCache) or cache.window is not None:
                continue
            if args.dcp * cache.num_heads > args.tp:
                raise InvalidSpecError(
                    f"--dcp {args.dcp}: {cache.num_heads} key-value heads on --tp {args.tp} "
                    f"leave {max(args.tp // cache.num_heads, 1)} ranks with the same heads, "
                    "which is the most that can share their tokens",
                    dcp=args.dcp,
                    tp=args.tp,
                )


def _plan_given_groups(args: argparse.Namespace) -> Plan:
    for option, is_given in (
        ("--memory", args.memory is not None),
        ("--at-len", args.at_len is not None),
        ("--tp", args.tp != 1),
        ("--pp", args.pp != 1),
    ):
        if is_given:
            raise InvalidSpecError(f"{option} needs --config", option=option)
    if not isinstance(args.max_model_len, int):
        raise InvalidSpecError("--group needs --max-model-len, a number of tokens")
    limits = limits_of(args, args.max_model_len)
    options = [parse_group(text) for text in args.groups]
    return Plan(tuple(_plan_group(option, limits) for option in options))


def _plan_group(option: GroupOption, limits: ServingLimits) -> PlannedGroup:
    try:
        layout = BlockTableLayout.plan(option.spec, limits, option.kernel_block_size)
    except BlockTableError as error:
        raise type(error)(f"group {option.text!r}: {error}", **error.details) from error
    return PlannedGroup(name=option.text, layout=layout)


def _text(args: argparse.Namespace, plan: Plan) -> str:
    if plan.model is None:
        parts = [show_groups(plan.groups)]
    else:
        split = {"tp": args.tp, "dcp": args.dcp, "pp": args.pp}
        sizes = [f"{name} {count}" for name, count in split.items() if count > 1]
        ranks = f"; bytes of one GPU of {', '.join(sizes)}" if sizes else ""
        parts = [show_model(plan.model, plan.groups, ranks=ranks)]
    if plan.capacity is not None:
        parts.append(show_capacity(plan.capacity))
    if args.explain and plan.model is not None:
        parts.append(explain_model(plan.model, plan.groups))
    elif args.explain:
        parts.append("\n".join(f"{g.name}: {g.layout.explain()}" for g in plan.groups))
    return "\n\n".join(parts)


def _record(plan: Plan) -> dict[str, object]:
    record: dict[str, object] = {
        "groups": [group.to_record() for group in plan.groups],
        "table_bytes": tables_bytes(group.layout for group in plan.groups),
    }
    if plan.model is not None:
        record = {
            "model_type": plan.model.model_type,
            "layers": len(plan.model.layers),
            "draft_layers": len(plan.model.draft_layers),
            "max_model_len": plan.groups[0].layout.limits.max_model_len,
            **record,
        }
    if plan.capacity is not None:
        record["capacity"] = {
            "memory": plan.capacity.memory,
            "pools": [pool._asdict() for pool in plan.capacity.pools],
            "at_len": plan.capacity.at_len,
            "requests": plan.capacity.num_requests,
            "longest_request": plan.capacity.longest,
            "limited_by": plan.capacity.limited_by,
        }
    return record
