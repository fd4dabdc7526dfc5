"""``bt-runner plan``: a model's block tables and caches, as a table for people or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from bt_runner.geometry.from_options import geometry_of, groups_of, limits_of
from bt_runner.geometry.planning import PlannedGroup, plan_groups
from bt_width import table_bytes

_COLUMNS = (
    "group",
    "layers",
    "block",
    "kernel block",
    "blocks/request",
    "width",
    "table bytes",
    "bytes/token",
    "state bytes/request",
    "index buffer bytes",
)


def run(args: argparse.Namespace) -> int:
    """Plan and print; return 0.

    Raises:
        BadInputError: The config is not understood.
        BlockTableError: The options make no plan.
    """
    geometry = geometry_of(args)
    planned = plan_groups(groups_of(args, geometry), limits_of(args, geometry))
    if args.json:
        groups = [group.to_record() for group in planned]
        print(json.dumps({"model_type": geometry.model_type, "groups": groups}, indent=2))
        return 0
    print(_as_table(planned))
    if args.explain:
        print()
        print("\n".join(_explanation(group) for group in planned))
    return 0


def _as_table(planned: Sequence[PlannedGroup]) -> str:
    rows = [_COLUMNS, *(_cells(group) for group in planned)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _cells(planned: PlannedGroup) -> tuple[str, ...]:
    layout = planned.layout
    members = " + ".join(f"{m.num_layers} {m.name}" for m in planned.group.members)
    numbers = (
        layout.block_size,
        layout.kernel_block_size,
        layout.max_num_blocks,
        layout.width,
        table_bytes(layout),
        planned.token_bytes,
        planned.state_bytes,
        planned.index_buffer_bytes,
    )
    return (planned.name, members, *(f"{number:,}" if number else "-" for number in numbers))


def _explanation(planned: PlannedGroup) -> str:
    lines = [f"{planned.name}: {planned.layout.explain()}"]
    for member in planned.group.members:
        if member.token_bytes:
            lines.append(f"  {member.name}: {member.token_bytes:,} bytes per token in all layers")
        else:
            lines.append(
                f"  {member.name}: {member.recurrent_bytes:,} bytes of state and "
                f"{member.conv_bytes:,} of convolution per layer"
            )
    return "\n".join(lines)
