"""One step's batch: two requests, one that decodes a token and one that prefills three."""

import torch

from bt_builders import CommonAttentionMetadata, local_lengths
from bt_tables import StagedBlockTables, StepBatch

BLOCK_IDS = ([3, 1], [2, 5])
SEQ_LENS = (20, 19)
QUERY_LENS = (1, 3)


def run_tables(tables: StagedBlockTables) -> CommonAttentionMetadata:
    """Give both requests their blocks, and return the batch as builders take it."""
    for row, block_ids in enumerate(BLOCK_IDS):
        tables.append_block_ids(row, [block_ids])
    spans = [range(end - new, end) for end, new in zip(SEQ_LENS, QUERY_LENS, strict=True)]
    positions = torch.tensor([position for span in spans for position in span])
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    query_lens = torch.tensor(QUERY_LENS, dtype=torch.int32)
    starts = torch.cat((query_lens.new_zeros(1), query_lens.cumsum(0, dtype=torch.int32)))
    num_reqs, num_tokens = len(seq_lens), len(positions)
    step = tables.step(
        StepBatch(
            idx_mapping=torch.arange(num_reqs, dtype=torch.int32),
            query_start_loc=starts,
            positions=positions,
            num_reqs_padded=num_reqs,
            num_tokens_padded=num_tokens,
        )
    )
    return CommonAttentionMetadata(
        layout=tables.layouts[0],
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        max_query_len=max(QUERY_LENS),
        max_seq_len=max(SEQ_LENS),
        query_start_loc=starts,
        query_start_loc_host=starts,
        seq_lens=seq_lens,
        seq_lens_upper_bound_host=seq_lens,
        local_seq_lens=local_lengths(seq_lens, tables.layouts[0]),
        num_computed_tokens=seq_lens - query_lens,
        num_accepted_tokens=torch.ones_like(seq_lens),
        is_prefilling=query_lens > 1,
        positions=positions,
        block_table=step.block_tables[0],
        slot_mapping=step.slot_mappings[0],
    )
