"""Staged tables: rows belong to requests; one step applies, gathers and maps in one launch.

attention [[10, 11, 14, 15], [6, 7, 0, 0], [0, 0, 0, 0]]
mamba     [[9], [8], [0]]
attention slots [454, 222, 223, 224, -1]
mamba slots     [-1, -1, -1, -1, -1]
"""

import torch

from bt_tables import StagedBlockTables, StepBatch
from bt_width import AttentionSpec, BlockTableLayout, MambaSpec, ServingLimits

limits = ServingLimits(max_model_len=128, max_num_reqs=4, max_num_batched_tokens=8)
attention = BlockTableLayout.plan(AttentionSpec(block_size=64), limits, kernel_block_size=32)
mamba = BlockTableLayout.plan(MambaSpec(block_size=64), limits)
tables = StagedBlockTables([attention, mamba], device="cpu", num_blocks=[16, 16])

# block ids cross the bus; the device makes kernel-block ids of them: 3 -> 6, 7
tables.append_block_ids(0, [[3], [8]])
tables.append_block_ids(2, [[5, 7], [9]])
batch = StepBatch(
    idx_mapping=torch.tensor([2, 0], dtype=torch.int32),
    query_start_loc=torch.tensor([0, 1, 4], dtype=torch.int32),
    positions=torch.tensor([70, 30, 31, 32]),
    num_reqs_padded=3,
    num_tokens_padded=5,
)
step = tables.step(batch)

print("attention", step.block_tables[0].tolist())
print("mamba    ", step.block_tables[1].tolist())
print("attention slots", step.slot_mappings[0].tolist())
print("mamba slots    ", step.slot_mappings[1].tolist())
