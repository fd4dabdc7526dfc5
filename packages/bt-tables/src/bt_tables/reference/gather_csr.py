"""The twin of ``kernels.gather_csr``: a batch's tables as compressed rows."""

from __future__ import annotations

import torch

from bt_width import NULL_BLOCK, PAD_SLOT


def gather_csr(
    table: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, tokens_per_column: int
) -> None:
    """Fill ``indices`` with the ids of each request, or with the slots of its tokens.

    The arguments are those of the kernel's launcher.
    """
    starts = indptr[:-1].long()
    request = torch.repeat_interleave(torch.arange(len(starts)), indptr.diff().long())
    in_request = torch.arange(indices.numel()) - starts[request]
    per_column = max(tokens_per_column, 1)
    ids = table[request, in_request // per_column].long()
    if tokens_per_column:
        slots = ids * per_column + in_request % per_column
        ids = torch.where(ids == NULL_BLOCK, PAD_SLOT, slots)
    indices.copy_(ids)
