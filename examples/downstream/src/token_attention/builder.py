"""Where every token of a request lies: the group's rows, taken apart into slots."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from bt_builders import BatchGuard, CommonAttentionMetadata
from bt_width import BlockTableLayout, BlockTableWidth


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What the kernel takes.

    Attributes:
        slots: [N, tokens of a row] int64; each token's slot, in the order of positions.
        seq_lens: [N] int32; tokens of each request.
        request_of_token: [T] int64; the request of each query token.
        positions: [T] int64.
    """

    slots: torch.Tensor
    seq_lens: torch.Tensor
    request_of_token: torch.Tensor
    positions: torch.Tensor


class TokenTableBuilder:
    """Keeps one slot for each token of a row, and so it asks how wide a row is."""

    requires_block_table_width: ClassVar[Literal[True]] = True
    cudagraph_support: ClassVar[Literal["never"]] = "never"

    def __init__(
        self,
        layout: BlockTableLayout,
        device: torch.device,
        *,
        block_table_width: BlockTableWidth,
    ) -> None:
        """Allocate for the largest batch that ``layout`` allows."""
        self._guard = BatchGuard(layout, device)
        size = layout.kernel_block_size
        self._offsets = torch.arange(size, device=device)
        rows = layout.limits.max_num_reqs
        self._slots = torch.zeros(rows, block_table_width, size, dtype=torch.int64, device=device)

    def build(self, common: CommonAttentionMetadata) -> TokenTable:
        """Return the slots of one step; valid until the next one is built."""
        self._guard.check(common)
        slots = self._slots[: common.num_reqs]
        blocks = common.block_table.long().unsqueeze(2)
        torch.add(blocks * len(self._offsets), self._offsets, out=slots)
        query_lens = common.query_start_loc.diff().long()
        requests = torch.arange(common.num_reqs, device=slots.device)
        return TokenTable(
            slots=slots.flatten(1),
            seq_lens=common.seq_lens,
            request_of_token=requests.repeat_interleave(query_lens),
            positions=common.positions,
        )
