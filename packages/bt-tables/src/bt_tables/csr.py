"""A batch's tables as compressed rows, for kernels that take no padded table."""

from __future__ import annotations

from typing import NamedTuple

import torch


class CsrTable(NamedTuple):
    """The ids of each request, one request after the other, all on the tables' device.

    Attributes:
        indptr: Where each request's ids start, and the end of the last, [N + 1] int32.
        indices: Kernel-block ids, or slots where the table is of tokens, int32.
        last_block_len: Tokens in each request's last kernel block, [N] int32; 0 for a
            request without tokens.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_block_len: torch.Tensor
