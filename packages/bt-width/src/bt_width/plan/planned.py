"""One planned cache group, and all its numbers as a record."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..capacity import addressable_tokens, index_buffer_bytes, table_bytes
from ..layout import BlockTableLayout
from ..models.groups import ModelGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A cache group and its layout.

    Attributes:
        name: What the group is called.
        layout: Its plan.
        group: What its layers keep, where a model is planned.
    """

    name: str
    layout: BlockTableLayout
    group: ModelGroup | None = None

    @property
    def index_buffer_bytes(self) -> int:
        """Bytes of the indexer's expanded table; 0 where the group has no indexer."""
        has_indexer = self.group is not None and self.group.has_indexer
        return index_buffer_bytes(self.layout) if has_indexer else 0

    def to_record(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        layout = self.layout
        record: dict[str, Any] = {
            "name": self.name,
            "kind": layout.kind,
            "block_size": layout.block_size,
            "kernel_block_size": layout.kernel_block_size,
            "blocks_per_request": layout.max_num_blocks,
            "width": layout.width,
            "addressable_tokens": addressable_tokens(layout),
            "table_bytes": table_bytes(layout),
        }
        if self.group is None:
            record["index_buffer_bytes"] = index_buffer_bytes(layout)
        else:
            record |= _record_of_model_group(self.group)
            record["index_buffer_bytes"] = self.index_buffer_bytes
        record["explain"] = layout.explain()
        record["layout"] = json.loads(layout.to_json())
        return record


def _record_of_model_group(group: ModelGroup) -> dict[str, Any]:
    return {
        "layers": group.num_layers,
        "cache_dtype": group.cache_dtype,
        "cache_bytes_per_token": group.token_bytes,
        "bytes_per_state": group.state_bytes,
        "bytes_per_block": group.block_bytes,
        "members": [
            {
                "name": member.name,
                "layers": member.num_layers,
                "cache_bytes_per_token": member.token_bytes,
                "recurrent_bytes": member.recurrent_bytes,
                "convolution_bytes": member.conv_bytes,
            }
            for member in group.members
        ],
    }
