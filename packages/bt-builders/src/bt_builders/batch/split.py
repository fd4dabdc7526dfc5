"""Where a batch's decodes end and its prefills begin; host numbers only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .common import CommonAttentionMetadata


class BatchSplit(NamedTuple):
    """The two parts of a batch: requests that decode, then requests that prefill.

    Attributes:
        num_decodes: Leading rows that decode; padding rows after them count where
            nothing prefills.
        num_decode_tokens: Tokens of those rows; padding tokens count likewise.
        decode_query_len: The most tokens of one decoding row.
        is_uniform: Whether every decoding row has ``decode_query_len`` tokens, a padding
            row as many padding tokens.
        num_prefills: Rows that prefill; padding rows are none.
        num_prefill_tokens: Tokens of those rows, without padding.
    """

    num_decodes: int
    num_decode_tokens: int
    decode_query_len: int
    is_uniform: bool
    num_prefills: int
    num_prefill_tokens: int

    @property
    def prefill_reqs(self) -> slice:
        """The rows that prefill."""
        return slice(self.num_decodes, self.num_decodes + self.num_prefills)


def split_batch(
    common: CommonAttentionMetadata, max_query_len: int, *, uniform: bool = False
) -> BatchSplit:
    """Split at the first request with more than ``max_query_len`` tokens.

    Args:
        common: The batch; decodes first is what makes the first part long.
        max_query_len: The most tokens of a row that decodes.
        uniform: Whether decodes must all have as many tokens as the first one.
    """
    query_lens = query_lens_of(common)
    decodes = query_lens <= max_query_len
    if not uniform:
        return split_at(common, query_lens, decodes)
    num_filled = _num_filled(query_lens)
    decodes[:num_filled] &= query_lens[:num_filled] == query_lens[:1]
    split = split_at(common, query_lens, decodes)
    if split.is_uniform or split.num_prefills:
        return split
    # padding that does not make whole rows is left out, rows and tokens
    num_tokens = int(common.query_start_loc_host[-1])
    return split._replace(num_decodes=num_filled, num_decode_tokens=num_tokens, is_uniform=True)


def query_lens_of(common: CommonAttentionMetadata) -> NDArray[np.int32]:
    """Return the tokens of each row in this step: [N] int32."""
    starts: NDArray[np.int32] = common.query_start_loc_host.numpy()
    return starts[1:] - starts[:-1]


def split_at(
    common: CommonAttentionMetadata, query_lens: NDArray[np.int32], decodes: NDArray[np.bool_]
) -> BatchSplit:
    """Split before the first row that is False in ``decodes`` [N]; ``query_lens`` is [N] too."""
    if decodes.all():
        is_uniform = _fills_every_row(common, query_lens)
        return BatchSplit(
            common.num_reqs, common.num_tokens, common.max_query_len, is_uniform, 0, 0
        )
    num_decodes = int(decodes.argmin())
    num_decode_tokens = int(common.query_start_loc_host[num_decodes])
    num_real_tokens = int(common.query_start_loc_host[-1])
    longest = int(query_lens[:num_decodes].max(initial=0))
    return BatchSplit(
        num_decodes,
        num_decode_tokens,
        longest,
        num_decodes * longest == num_decode_tokens,
        _num_filled(query_lens) - num_decodes,
        num_real_tokens - num_decode_tokens,
    )


def _fills_every_row(common: CommonAttentionMetadata, query_lens: NDArray[np.int32]) -> bool:
    """Say whether N rows of ``max_query_len`` are the batch, up to padding rows at its end."""
    if common.num_reqs * common.max_query_len != common.num_tokens:
        return False
    num_filled = _num_filled(query_lens)
    return bool((query_lens[:num_filled] == common.max_query_len).all())


def _num_filled(query_lens: NDArray[np.int32]) -> int:
    """Return the rows up to the last one that has tokens; behind it is padding."""
    filled = query_lens.nonzero()[0]
    return int(filled[-1]) + 1 if filled.size else 0
