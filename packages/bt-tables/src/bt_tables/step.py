"""What a step takes and gives: two named tuples."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._launch.arrays import HostArray


class StepBatch(NamedTuple):
    """The batch of a step.

    Attributes:
        idx_mapping: Row of each request, [N] int32 on the host; -1 is padding.
        query_start_loc: First token of each request and the end of the last, [N + 1]
            int32, on the host or the device.
        positions: Place of each token in its request, int64, on the host or the device.
        num_reqs_padded: Rows of the returned tables.
        num_tokens_padded: Slots of the returned mappings.
    """

    idx_mapping: HostArray
    query_start_loc: HostArray
    positions: HostArray
    num_reqs_padded: int
    num_tokens_padded: int


class StepTables(NamedTuple):
    """What a step left on the device, in views of storage that never moves.

    Attributes:
        block_tables: Of each group, [num_reqs_padded, W] int32.
        slot_mappings: [G, num_tokens_padded] int64.
    """

    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: torch.Tensor
