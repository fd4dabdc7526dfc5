"""Splits batches on the host: decodes from prefills, and micro-batches from one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bt_width import InvalidEditError

from ._checks import as_tuple, require_positive
from .common import CommonAttentionMetadata, QueryLens, localise, query_lens_of, require_common
from .guard import BatchGuard


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

    def bounded(self, max_decode_tokens: int) -> BatchSplit:
        """Return the split with no more padding among its decode tokens than a buffer holds.

        What was left out is padding at the batch's end: rows that decode have few tokens.
        """
        if self.num_decode_tokens <= max_decode_tokens or self.num_prefills:
            return self
        return self._replace(num_decode_tokens=max_decode_tokens, is_uniform=False)

    @property
    def prefill_reqs(self) -> slice:
        """The rows that prefill."""
        return slice(self.num_decodes, self.num_decodes + self.num_prefills)


def split_decodes_and_prefills(
    common: CommonAttentionMetadata, max_query_len: int, *, uniform: bool = False
) -> BatchSplit:
    """Split a batch at the first request with more than ``max_query_len`` tokens.

    Host numbers only: nothing waits for the device. Call it on a batch that was checked
    (``BatchGuard``), as every builder's ``build`` does.

    Args:
        common: The batch; decodes first is what makes the first part long.
        max_query_len: The most tokens of a row that decodes.
        uniform: Whether decodes must all have as many tokens as the first one.

    Raises:
        InvalidSpecError: An argument has the wrong type or is out of range.
    """
    require_common(common)
    require_positive("max_query_len", max_query_len)
    return split_batch(common, max_query_len, uniform=uniform)


def split_batch(
    common: CommonAttentionMetadata, max_query_len: int, *, uniform: bool = False
) -> BatchSplit:
    """Split as ``split_decodes_and_prefills`` does a batch that was checked."""
    query_lens = query_lens_of(common)
    if not uniform and common.max_query_len <= max_query_len:
        return split_at(common, query_lens, common.num_reqs)
    lens = query_lens.of_rows
    decodes = lens <= max_query_len
    if not uniform:
        return split_at(common, query_lens, leading_true(decodes))
    num_filled = _num_filled(lens)
    decodes[:num_filled] &= lens[:num_filled] == lens[:1]
    split = split_at(common, query_lens, leading_true(decodes))
    if split.is_uniform or split.num_prefills:
        return split
    # padding that does not make whole rows is left out, rows and tokens
    num_tokens = int(common.query_start_loc_host[-1])
    return split._replace(num_decodes=num_filled, num_decode_tokens=num_tokens, is_uniform=True)


def leading_true(flags: NDArray[np.bool_]) -> int:
    """Return how many entries there are before the first that is False."""
    return flags.size if flags.all() else int(flags.argmin())


def split_at(
    common: CommonAttentionMetadata, query_lens: QueryLens, num_decodes: int
) -> BatchSplit:
    """Split behind ``num_decodes`` rows."""
    if num_decodes == common.num_reqs:
        # the usual step: every row has as many tokens as the longest, none is padding
        longest = common.max_query_len
        is_uniform = common.num_reqs * longest == common.num_tokens and (
            query_lens.shortest == longest or _fills_every_row(longest, query_lens.of_rows)
        )
        return BatchSplit(common.num_reqs, common.num_tokens, longest, is_uniform, 0, 0)
    starts = common.query_start_loc_host.numpy()
    num_decode_tokens, num_real_tokens = int(starts[num_decodes]), int(starts[-1])
    longest = int(query_lens.of_rows[:num_decodes].max(initial=0))
    return BatchSplit(
        num_decodes,
        num_decode_tokens,
        longest,
        num_decodes * longest == num_decode_tokens,
        _num_filled(query_lens.of_rows) - num_decodes,
        num_real_tokens - num_decode_tokens,
    )


def _fills_every_row(longest: int, query_lens: NDArray[np.int32]) -> bool:
    """Say whether all rows up to the padding at the batch's end have ``longest`` tokens."""
    num_filled = _num_filled(query_lens)
    return bool((query_lens[:num_filled] == longest).all())


def _num_filled(query_lens: NDArray[np.int32]) -> int:
    """Return the rows up to the last one that has tokens; behind it is padding."""
    filled = query_lens.nonzero()[0]
    return int(filled[-1]) + 1 if filled.size else 0


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
        BlockTableError: ``common`` is not a batch that a builder would take.
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
        local_seq_lens=localise(seq_lens, common.layout.addressing),
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
