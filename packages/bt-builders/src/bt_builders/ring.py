"""Builds the metadata of a k-pool tail: the last tokens' keys, in a ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from bt_width import BlockTableLayout, InvalidSpecError

from ._checks import require_layout
from .common import CommonAttentionMetadata
from .drafts import SlotBuilder
from .operations import DraftRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingTailMetadata:
    """One step of a ring group.

    Attributes:
        ring_size: Tokens of a ring.
        slot_mapping: [T] int64; ``own_block * ring_size + position % ring_size``.
        positions: [T] int64; each token's place in its request.
        block_table: [N, 1] int32; each request's own block.
        num_live: [N] int32; slots of each request's ring that hold a token.
    """

    ring_size: int
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    num_live: torch.Tensor


class RingTailMetadataBuilder(SlotBuilder[RingTailMetadata]):
    """Builds a ring group's metadata; its slots are the table's own.

    Belongs to one thread at a time; those of other groups and micro-batches run beside it.
    """

    requires_block_table_width: ClassVar[Literal[False]] = False
    cudagraph_support: ClassVar[Literal["always"]] = "always"

    def __init__(self, layout: BlockTableLayout, device: torch.device | str) -> None:
        """Allocate for the largest batch that ``layout`` allows.

        Raises:
            InvalidSpecError: The group is not a ring.
        """
        require_layout(layout)
        if layout.slot_mode != "ring":
            raise InvalidSpecError(
                f"a ring's tail needs a RingSpec group, not one of kind {layout.kind}",
                layout=layout,
            )
        super().__init__(layout, device)
        self._ring_size = layout.block_size
        self._num_live = torch.zeros(
            layout.limits.max_num_reqs, dtype=torch.int32, device=self._device
        )

    def build(self, common: CommonAttentionMetadata) -> RingTailMetadata:
        """Return the metadata of one step; valid until the next one is built.

        Raises:
            WidthMismatchError: A tensor of ``common`` is not as planned; nothing changed.
            InvalidEditError: The batch is larger than planned; nothing changed.
            RowOverflowError: A request is longer than a row was planned for; nothing changed.
        """
        self._guard.check(common)
        return self._describe(
            common.block_table, common.seq_lens, common.slot_mapping, common.positions
        )

    def rebind(self) -> None:
        """Write the builder's constants and buffers anew, in place, after memory was lost."""
        super().rebind()
        self._num_live.zero_()

    def _describe_drafts(self, block_table: torch.Tensor, rows: DraftRows) -> RingTailMetadata:
        return self._describe(block_table, rows.seq_lens, rows.slot_mapping, rows.positions)

    def _describe(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
    ) -> RingTailMetadata:
        num_live = self._num_live[: seq_lens.numel()]
        torch.clamp(seq_lens, 0, self._ring_size, out=num_live)
        return RingTailMetadata(
            ring_size=self._ring_size,
            slot_mapping=slot_mapping,
            positions=positions,
            block_table=block_table,
            num_live=num_live,
        )
