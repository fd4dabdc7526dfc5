"""The reference of ``kernels.gather_csr``: a batch's tables as compressed rows."""

from __future__ import annotations

import torch

from bt_width import NULL_BLOCK, PAD_SLOT


def gather_csr(
    table: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    num_indices: int,
    tokens_per_column: int,
) -> None:
    """Fill ``indices`` with the ids of each request, or with the slots of its tokens.

    The arguments are those of the kernel's launcher.
    """
    starts = indptr[: len(table) + 1].long()
    request = torch.repeat_interleave(torch.arange(len(table)), starts.diff())
    in_request = torch.arange(num_indices) - starts[request]
    per_column = max(tokens_per_column, 1)
    ids = table[request, in_request // per_column].long()
    if tokens_per_column:
        slots = ids * per_column + in_request % per_column
        ids = torch.where(ids == NULL_BLOCK, PAD_SLOT, slots)
    indices[:num_indices].copy_(ids)
