"""A table on the device: three requests come, one grows, one goes, and nothing stale stays.

three came
[[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 0]]
the first grew, the second went, the last took its place
[[1, 2, 7, 0], [4, 5, 6, 0], [0, 0, 0, 0]]
slots of the tokens at positions 33 and 47
[[113, 111, -1, -1]]
"""

import torch

from bt_tables import MultiGroupBlockTable
from bt_width import AttentionSpec, BlockTableLayout, ServingLimits

limits = ServingLimits(max_model_len=64, max_num_reqs=3, max_num_batched_tokens=8)
layout = BlockTableLayout.plan(AttentionSpec(block_size=16, token_alignment=None), limits)
tables = MultiGroupBlockTable([layout], device="cpu", num_blocks=[32])

for row, block_ids in enumerate(([1, 2], [3], [4, 5, 6])):
    tables.add_row([block_ids], row)  # one sequence of block ids a group
tables.commit(3)
print("three came")
print(tables.block_table(0).tolist())

tables.append_row([[7]], 0)
tables.move_row(2, 1)
tables.commit(2)
print("the first grew, the second went, the last took its place")
print(tables.block_table(0).tolist())

starts = torch.tensor([0, 1, 2], dtype=torch.int32)
positions = torch.tensor([33, 47])
print("slots of the tokens at positions 33 and 47")
print(tables.compute_slot_mappings(starts, positions, num_tokens_padded=4).tolist())
