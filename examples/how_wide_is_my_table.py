"""How wide is my table? The lengths of a public crash report (vLLM #46074), and why.

230000 tokens: 3594 columns, 920064 bytes
300000 tokens: 4688 columns, 1200128 bytes
325000 tokens: 5080 columns, 1300480 bytes
350000 tokens: 5470 columns, 1400320 bytes
max_model_len 350000 / (block 64 x 1 shard) = 5469 blocks
rounded up to 5470 so that a row spans a multiple of 128 tokens
x 1 kernel block = 5470 columns
position 349999: column 5468, offset 47
"""

from bt_width import AttentionSpec, BlockTableLayout, ServingLimits, table_bytes


def plan(max_model_len: int) -> BlockTableLayout:
    """Plan the rows of 64 requests of at most this many tokens."""
    limits = ServingLimits(
        max_model_len=max_model_len, max_num_reqs=64, max_num_batched_tokens=8192
    )
    return BlockTableLayout.plan(AttentionSpec(block_size=64), limits)


for length in (230_000, 300_000, 325_000, 350_000):
    layout = plan(length)
    print(f"{length} tokens: {layout.width} columns, {table_bytes(layout)} bytes")

print(*layout.explain().split(", "), sep="\n")
rank, column, offset = layout.locate(349_999)
print(f"position 349999: column {column}, offset {offset}")
