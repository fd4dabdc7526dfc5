"""My own builder: it asks for the width and is handed the group's (downstream/ runs a step of one).

max_model_len 32768 / (block 48 x 1 shard) = 683 blocks
rounded up to 688 so that a row spans a multiple of 128 tokens
x 3 kernel blocks = 2064 columns
RowCopies (4, 2064) CudagraphSupport(level='always', limited_by='RowCopies')
"""

from typing import ClassVar, Literal

import torch

from bt_builders import AttentionBackend, AttentionGroup, CommonAttentionMetadata, init_attention
from bt_width import AttentionSpec, BlockTableLayout, BlockTableWidth, ServingLimits


class RowCopies:
    """Copies each request's row, for a kernel that writes to its table."""

    requires_block_table_width: ClassVar[Literal[True]] = True
    cudagraph_support: ClassVar[Literal["always"]] = "always"

    def __init__(
        self, layout: BlockTableLayout, device: torch.device, *, block_table_width: BlockTableWidth
    ) -> None:
        rows = layout.limits.max_num_reqs
        self.table = torch.zeros(rows, block_table_width, dtype=torch.int32, device=device)

    def build(self, common: CommonAttentionMetadata) -> torch.Tensor:
        return self.table[: common.num_reqs].copy_(common.block_table)


mine = AttentionBackend(name="mine", builder_class=RowCopies, supported_kernel_block_sizes=[16])
group = AttentionGroup(name="layers", spec=AttentionSpec(block_size=48), backends=(mine,))
limits = ServingLimits(max_model_len=32_768, max_num_reqs=4, max_num_batched_tokens=64)
setup = init_attention([group], limits, "cpu")
print(*setup.layouts[0].explain().split(", "), sep="\n")
(builder,) = setup.groups[0].builders
print(type(builder).__name__, tuple(vars(builder)["table"].shape), setup.cudagraph_support)
