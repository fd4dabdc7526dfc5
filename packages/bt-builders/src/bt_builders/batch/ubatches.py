"""A batch cut into micro-batches, each as if it had been built alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from bt_width import InvalidEditError

from ..arguments import as_tuple
from .common import CommonAttentionMetadata
from .geometry import RowGeometry, localise
from .guard import BatchGuard, require_common


def split_ubatches(
    common: CommonAttentionMetadata, cuts: Sequence[int]
) -> tuple[CommonAttentionMetadata, ...]:
    """Cut a batch at tokens.

    A request that a cut goes through stands in both parts; in the second one the
    tokens of the first are computed. Padding rows go where their share of the padding
    tokens goes. Rows of the table and slots are views.

    Args:
        common: The batch.
        cuts: Where to cut, ascending, in tokens of the batch, padding included.

    Raises:
        InvalidEditError: A cut lies outside the batch or before another one.
        BlockTableError: ``common`` is no batch that a builder would take.
    """
    require_common(common)
    table: object = common.block_table
    device = table.device if isinstance(table, torch.Tensor) else torch.device("cpu")
    BatchGuard(common.layout, device).check(common)
    places = as_tuple("cuts", cuts, int)
    bounds = [0, *places, common.num_tokens]
    if any(first > second for first, second in pairwise(bounds)):
        raise InvalidEditError(
            f"cuts {places} must ascend within the {common.num_tokens} tokens of the batch",
            cuts=places,
            num_tokens=common.num_tokens,
        )
    starts = _starts_with_padding(common)
    return tuple(_slice(common, starts, first, last) for first, last in pairwise(bounds))


def _starts_with_padding(common: CommonAttentionMetadata) -> NDArray[np.int32]:
    """Return where rows begin if padding rows share the padding tokens evenly."""
    starts: NDArray[np.int32] = common.query_start_loc_host.numpy().copy()
    num_real_tokens = starts[-1]
    num_reqs = common.num_reqs
    num_padding = num_reqs - int(np.count_nonzero(starts < num_real_tokens))
    if num_padding:
        share = (common.num_tokens - num_real_tokens) // num_padding
        starts[num_reqs - num_padding : num_reqs] += share * np.arange(num_padding, dtype=np.int32)
    starts[-1] = common.num_tokens
    return starts


def _slice(
    common: CommonAttentionMetadata, starts: NDArray[np.int32], first: int, last: int
) -> CommonAttentionMetadata:
    """Return the tokens [first, last) and the rows that have some of them."""
    begin = int(starts[1:].searchsorted(first, side="right"))
    end = max(int(starts[:-1].searchsorted(last, side="left")), begin)
    rows, tokens = slice(begin, end), slice(first, last)
    if last == common.num_tokens:
        rows = slice(begin, common.num_reqs)
    ends = slice(rows.start, rows.stop + 1)
    before, behind = _cut_off(common.query_start_loc[ends], first, last)
    _, behind_host = _cut_off(common.query_start_loc_host[ends], first, last)
    seq_lens = common.seq_lens[rows] - behind
    bounds_host = common.seq_lens_upper_bound_host[rows] - behind_host
    starts_host = common.query_start_loc_host[ends].clamp(first, last) - first
    query_lens = starts_host.diff()
    longest = int(query_lens.max()) if query_lens.numel() else 0
    return replace(
        common,
        num_reqs=rows.stop - rows.start,
        num_tokens=last - first,
        max_query_len=longest or common.max_query_len,
        max_seq_len=int(bounds_host.max()) if bounds_host.numel() else 0,
        query_start_loc=common.query_start_loc[ends].clamp(first, last) - first,
        query_start_loc_host=starts_host,
        seq_lens=seq_lens,
        seq_lens_upper_bound_host=bounds_host,
        local_seq_lens=localise(seq_lens, RowGeometry.of(common.layout)),
        num_computed_tokens=common.num_computed_tokens[rows] + before,
        num_accepted_tokens=common.num_accepted_tokens[rows].masked_fill(before > 0, 1),
        is_prefilling=common.is_prefilling[rows],
        positions=common.positions[tokens],
        block_table=common.block_table[rows],
        slot_mapping=common.slot_mapping[tokens],
    )


def _cut_off(
    query_start_loc: torch.Tensor, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many tokens of each row lie before ``first`` and behind ``last``."""
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    before = torch.minimum((first - starts).clamp(min=0), ends - starts)
    behind = torch.minimum((ends - last).clamp(min=0), ends - starts)
    return before, behind
