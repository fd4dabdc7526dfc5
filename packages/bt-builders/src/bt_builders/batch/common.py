"""What every builder of a cache group is given for one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bt_width import BlockTableLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommonAttentionMetadata:
    """One step's batch as one cache group sees it.

    Where a feature is off its field holds its neutral value: no field is optional.
    Padding rows stand after the requests, with no tokens, a length of 0 and a null row;
    padding tokens stand after the tokens, with ``PAD_SLOT``. N and T count both.

    Attributes:
        layout: The group's plan, the one its table and its builders hold.
        num_reqs: Rows of the batch (N), padding included.
        num_tokens: Tokens of the step (T), padding included.
        max_query_len: The most tokens of one request in this step; in a batch of padding
            alone, of a row that stands for one.
        max_seq_len: An upper bound of ``seq_lens``.
        query_start_loc: [N + 1] int32; where each request's tokens begin.
        query_start_loc_host: [N + 1] int32, on the host.
        seq_lens: [N] int32; tokens of each request, this step's included.
        seq_lens_upper_bound_host: [N] int32, on the host; exact for a request that is
            prefilling, otherwise at most its undecided drafts too many; never above
            ``max_model_len + lookahead_tokens``.
        local_seq_lens: [N] int32; those of ``seq_lens`` that this rank keeps.
        num_computed_tokens: [N] int32; tokens of each request before this step.
        num_accepted_tokens: [N] int32; tokens of each request's last step that stayed:
            1 where it had no drafts.
        is_prefilling: [N] bool, on the host; whether the tokens of this step were given
            (a prompt, or output computed again after a preemption).
        positions: [T] int64; each token's place in its request.
        block_table: [N, W] int32; kernel-block ids, ``NULL_BLOCK`` past a row's own.
        slot_mapping: [T] int64; each token's slot in the group's cache.
    """

    layout: BlockTableLayout
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    query_start_loc_host: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_upper_bound_host: torch.Tensor
    local_seq_lens: torch.Tensor
    num_computed_tokens: torch.Tensor
    num_accepted_tokens: torch.Tensor
    is_prefilling: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
