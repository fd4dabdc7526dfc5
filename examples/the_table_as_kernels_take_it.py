"""The same rows as kernels take them: FlashInfer's CSR, FlashMLA's and DeepGEMM's padded rows.

FlashInfer
  indptr        [0, 3, 4]
  indices       [4, 5, 2, 3]
  last_page_len [6, 64]
FlashMLA
  block_table   [[4, 5, 2, 0], [3, 0, 0, 0]] in rows of stride 4
  cache_seqlens [134, 64]
DeepGEMM
  block_table   [[4, 5, 2, 0], [3, 0, 0, 0]] the same memory: True
  context_lens  [[134], [64]]
"""

import torch

from bt_tables import MultiGroupBlockTable
from bt_width import AttentionSpec, BlockTableLayout, ServingLimits

limits = ServingLimits(max_model_len=256, max_num_reqs=4, max_num_batched_tokens=8)
layout = BlockTableLayout.plan(AttentionSpec(block_size=64), limits)
tables = MultiGroupBlockTable([layout], device="cpu")
tables.add_row([[4, 5, 2]], 0)
tables.add_row([[3]], 1)
tables.commit(2)
seq_lens = torch.tensor([134, 64], dtype=torch.int32)

csr = tables.gather_csr(0, seq_lens, num_reqs=2)
print("FlashInfer\n  indptr       ", csr.indptr.tolist())
print("  indices      ", csr.indices.tolist())
print("  last_page_len", csr.last_block_len.tolist())

rows = tables.block_table(0)[:2]
print(f"FlashMLA\n  block_table   {rows.tolist()} in rows of stride {rows.stride(0)}")
print("  cache_seqlens", seq_lens.tolist())

same = rows.data_ptr() == tables.block_table(0).data_ptr()
print(f"DeepGEMM\n  block_table   {rows.tolist()} the same memory: {same}")
print("  context_lens ", seq_lens.view(-1, 1).tolist())
