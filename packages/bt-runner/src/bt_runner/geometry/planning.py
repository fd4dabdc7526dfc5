"""The plan of every cache group of a model, and what it costs; nothing is built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bt_builders import prepare_kernel_block_sizes
from bt_runner.geometry.groups import GeometryGroup
from bt_width import BlockTableLayout, ServingLimits, index_buffer_bytes, table_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A cache group and its layout.

    Attributes:
        group: The group.
        layout: Its plan.
    """

    group: GeometryGroup
    layout: BlockTableLayout

    @property
    def name(self) -> str:
        """What the group is called."""
        return self.group.attention.name

    @property
    def num_layers(self) -> int:
        """Layers of the group: those of its first member, which others are a part of."""
        return self.group.members[0].num_layers

    @property
    def token_bytes(self) -> int:
        """Bytes of the cache per token, of all layers; ranks share them."""
        return sum(member.token_bytes for member in self.group.members)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that a request keeps at a time, of all layers."""
        kept = self.layout.max_resident_blocks(self.layout.limits.max_num_batched_tokens)
        return kept * sum(member.state_bytes for member in self.group.members)

    @property
    def index_buffer_bytes(self) -> int:
        """Bytes of the indexer's expanded table; 0 where the group has no indexer."""
        return index_buffer_bytes(self.layout) if self.group.has_indexer else 0

    def to_record(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        layout = self.layout
        return {
            "name": self.name,
            "kind": layout.kind,
            "layers": self.num_layers,
            "block_size": layout.block_size,
            "kernel_block_size": layout.kernel_block_size,
            "blocks_per_request": layout.max_num_blocks,
            "width": layout.width,
            "table_bytes": table_bytes(layout),
            "cache_bytes_per_token": self.token_bytes,
            "state_bytes_per_request": self.state_bytes,
            "index_buffer_bytes": self.index_buffer_bytes,
            "members": [
                {
                    "name": member.name,
                    "layers": member.num_layers,
                    "cache_bytes_per_token": member.token_bytes,
                    "recurrent_bytes_per_layer": member.recurrent_bytes,
                    "convolution_bytes_per_layer": member.conv_bytes,
                }
                for member in self.group.members
            ],
            "explain": layout.explain(),
            "layout": json.loads(layout.to_json()),
        }


def plan_groups(groups: Sequence[GeometryGroup], limits: ServingLimits) -> tuple[PlannedGroup, ...]:
    """Plan each group with the kernel block that its backends agree on.

    Raises:
        NoCommonBlockSizeError: They agree on none.
        InvalidSpecError: A group and the limits do not go together.
    """
    sizes = prepare_kernel_block_sizes([group.attention for group in groups])
    return tuple(
        PlannedGroup(group=group, layout=BlockTableLayout.plan(group.attention.spec, limits, size))
        for group, size in zip(groups, sizes, strict=True)
    )
