"""A step's plan as arrays: what the tables, the builders and the model are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from bt_builders import CommonAttentionMetadata, local_lengths
from bt_runner.scheduling.step_plan import Scheduled
from bt_tables import StepBatch, StepTables
from bt_width import BlockTableLayout, ServingLimits

Number = TypeVar("Number", int, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArrays:
    """One step's batch on the host and on the device; N rows and T tokens, padding included.

    Attributes:
        num_reqs: Rows (N).
        num_tokens: Tokens (T).
        max_query_len: The most tokens of one request.
        rows: ``[N]`` int32, host; each request's line in the tables, -1 for padding.
        query_start_loc_host: ``[N + 1]`` int32.
        seq_lens_host: ``[N]`` int32; 0 for padding.
        is_prefilling: ``[N]`` bool, host.
        token_ids: ``[T]`` int64.
        positions: ``[T]`` int64; -1 for padding.
        query_start_loc: ``[N + 1]`` int32.
        seq_lens: ``[N]`` int32.
        num_computed_tokens: ``[N]`` int32.
        num_accepted_tokens: ``[N]`` int32.
        req_of_token: ``[T]`` int64, the batch's row of each token; the last one for padding.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    rows: Tensor
    query_start_loc_host: Tensor
    seq_lens_host: Tensor
    is_prefilling: Tensor
    token_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_computed_tokens: Tensor
    num_accepted_tokens: Tensor
    req_of_token: Tensor

    def for_tables(self) -> StepBatch:
        """Return what the table update is given."""
        return StepBatch(
            idx_mapping=self.rows,
            query_start_loc=self.query_start_loc_host,
            positions=self.positions,
            num_reqs_padded=self.num_reqs,
            num_tokens_padded=self.num_tokens,
        )

    def for_builders(
        self,
        layouts: Sequence[BlockTableLayout],
        tables: StepTables,
        max_seq_len: int | None = None,
    ) -> list[CommonAttentionMetadata]:
        """Return what each group's builders are given.

        Args:
            layouts: One per group.
            tables: What the table update returned.
            max_seq_len: An upper bound to plan with instead of the batch's longest request.
        """
        return [
            CommonAttentionMetadata(
                layout=layout,
                num_reqs=self.num_reqs,
                num_tokens=self.num_tokens,
                max_query_len=self.max_query_len,
                max_seq_len=max_seq_len or int(self.seq_lens_host.max()),
                query_start_loc=self.query_start_loc,
                query_start_loc_host=self.query_start_loc_host,
                seq_lens=self.seq_lens,
                seq_lens_upper_bound_host=self.seq_lens_host,
                local_seq_lens=local_lengths(self.seq_lens, layout),
                num_computed_tokens=self.num_computed_tokens,
                num_accepted_tokens=self.num_accepted_tokens,
                is_prefilling=self.is_prefilling,
                positions=self.positions,
                block_table=tables.block_tables[group],
                slot_mapping=tables.slot_mappings[group],
            )
            for group, layout in enumerate(layouts)
        ]


class BatchBuffers:
    """Where the batch's arrays lie on the device: at one address each, whatever the batch.

    A captured graph reads them there.

    Attributes:
        device: The device.
    """

    def __init__(self, limits: ServingLimits, device: torch.device) -> None:
        """Allocate for the largest step."""
        self.device = device
        num_tokens, num_reqs = limits.max_num_batched_tokens, limits.max_num_reqs
        tokens = torch.zeros(3, num_tokens, dtype=torch.int64, device=device)
        requests = torch.zeros(3, num_reqs, dtype=torch.int32, device=device)
        self.token_ids, self.positions, self.req_of_token = tokens.unbind()
        self.seq_lens, self.num_computed_tokens, self.num_accepted_tokens = requests.unbind()
        self.query_start_loc = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)


def assemble(
    scheduled: Sequence[Scheduled],
    buffers: BatchBuffers,
    *,
    num_reqs_padded: int | None = None,
    num_tokens_padded: int | None = None,
) -> BatchArrays:
    """Lay a batch out in arrays, padded where a captured graph wants more rows or tokens."""
    query_lens = [part.num_tokens for part in scheduled]
    num_tokens = sum(query_lens)
    num_reqs = num_reqs_padded or len(scheduled)
    num_padded = num_tokens_padded or num_tokens

    def host(values: Sequence[Number], size: int, fill: Number, dtype: torch.dtype) -> Tensor:
        return torch.tensor([*values, *[fill] * (size - len(values))], dtype=dtype)

    def per_request(values: Sequence[int], fill: int) -> Tensor:
        return host(values, num_reqs, fill, torch.int32)

    def per_token(values: Sequence[int], fill: int) -> Tensor:
        return host(values, num_padded, fill, torch.int64)

    starts = np.cumsum([0, *query_lens]).tolist()
    query_start_loc = host(starts, num_reqs + 1, num_tokens, torch.int32)
    seq_lens = per_request([part.seq_len for part in scheduled], 0)
    token_ids = [token for part in scheduled for token in part.token_ids]
    positions = [position for part in scheduled for position in range(part.start, part.seq_len)]
    req_of_token = np.repeat(np.arange(len(scheduled)), query_lens).tolist()
    computed = [part.start for part in scheduled]
    accepted = [part.request.num_accepted for part in scheduled]
    return BatchArrays(
        num_reqs=num_reqs,
        num_tokens=num_padded,
        max_query_len=max(query_lens),
        rows=per_request([part.row for part in scheduled], -1),
        query_start_loc_host=query_start_loc,
        seq_lens_host=seq_lens,
        is_prefilling=host([part.is_prefilling for part in scheduled], num_reqs, False, torch.bool),
        token_ids=_put(buffers.token_ids, per_token(token_ids, 0)),
        positions=_put(buffers.positions, per_token(positions, -1)),
        query_start_loc=_put(buffers.query_start_loc, query_start_loc),
        seq_lens=_put(buffers.seq_lens, seq_lens),
        num_computed_tokens=_put(buffers.num_computed_tokens, per_request(computed, 0)),
        num_accepted_tokens=_put(buffers.num_accepted_tokens, per_request(accepted, 1)),
        req_of_token=_put(buffers.req_of_token, per_token(req_of_token, num_reqs - 1)),
    )


def _put(buffer: Tensor, values: Tensor) -> Tensor:
    return buffer[: len(values)].copy_(values)
