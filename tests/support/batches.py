"""One step's batch for builders' tests, written token by token from the pure contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bt_builders import CommonAttentionMetadata
from bt_width import NULL_BLOCK, PAD_SLOT, BlockTableLayout


@dataclass(frozen=True)
class Request:
    """A request of a step: its length, this step's tokens included, and how many those are."""

    seq_len: int
    query_len: int
    block_ids: tuple[int, ...] | None = None
    is_prefilling: bool = False
    num_accepted: int = 1
    # an async scheduler knows a decoding request's length up to its drafts
    bound_slack: int = 0

    @property
    def num_computed(self) -> int:
        return self.seq_len - self.query_len


def make_batch(
    layout: BlockTableLayout,
    requests: Sequence[Request],
    *,
    num_reqs: int | None = None,
    num_tokens: int | None = None,
    max_query_len: int | None = None,
) -> CommonAttentionMetadata:
    """The batch of ``requests``, padded to ``num_reqs`` rows and ``num_tokens`` tokens."""
    starts = [0]
    positions: list[int] = []
    slots: list[int] = []
    rows = rows_of(layout, requests)
    for request, row in zip(requests, rows, strict=True):
        starts.append(starts[-1] + request.query_len)
        for position in range(request.num_computed, request.seq_len):
            positions.append(position)
            slots.append(layout.slot(position, row))
    total = len(requests) if num_reqs is None else num_reqs
    num_pad_reqs = total - len(requests)
    num_pad_tokens = (len(positions) if num_tokens is None else num_tokens) - len(positions)
    padding = [0] * num_pad_reqs
    starts += [starts[-1]] * num_pad_reqs
    lens = [request.seq_len for request in requests] + padding
    bounds = [request.seq_len + request.bound_slack for request in requests] + padding
    return CommonAttentionMetadata(
        layout=layout,
        num_reqs=total,
        num_tokens=len(positions) + num_pad_tokens,
        max_query_len=max([r.query_len for r in requests], default=0)
        if max_query_len is None
        else max_query_len,
        max_seq_len=max(bounds, default=0),
        query_start_loc=_int32(starts),
        query_start_loc_host=_int32(starts),
        seq_lens=_int32(lens),
        seq_lens_upper_bound_host=_int32(bounds),
        local_seq_lens=_int32([layout.local_length(length) for length in lens]),
        num_computed_tokens=_int32([request.num_computed for request in requests] + padding),
        num_accepted_tokens=_int32(
            [request.num_accepted for request in requests] + [1] * num_pad_reqs
        ),
        is_prefilling=torch.tensor(
            [request.is_prefilling for request in requests] + [False] * num_pad_reqs,
            dtype=torch.bool,
        ),
        positions=torch.tensor(positions + [0] * num_pad_tokens, dtype=torch.int64),
        block_table=table_of(layout, rows, total),
        slot_mapping=torch.tensor(slots + [PAD_SLOT] * num_pad_tokens, dtype=torch.int64),
    )


def rows_of(layout: BlockTableLayout, requests: Sequence[Request]) -> list[list[int]]:
    """Each request's kernel-block ids; blocks are numbered in turn where none are given."""
    rows = []
    next_block = 1
    for request in requests:
        block_ids = request.block_ids
        if block_ids is None:
            count = layout.num_blocks(request.seq_len)
            block_ids = tuple(range(next_block, next_block + count))
            next_block += count
        rows.append(layout.expand(list(block_ids)))
    return rows


def table_of(
    layout: BlockTableLayout, rows: Sequence[Sequence[int]], num_reqs: int
) -> torch.Tensor:
    """The table of ``rows``, null past each row's ids and below the last row."""
    table = torch.full((num_reqs, layout.width), NULL_BLOCK, dtype=torch.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = _int32(row)
    return table


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
