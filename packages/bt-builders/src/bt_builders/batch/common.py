"""Defines what every builder of a cache group is given for one step, and how it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from bt_width import BlockTableLayout, InvalidEditError, InvalidSpecError

from ..arguments import indexed_device, require_layout
from .geometry import local_lengths

if TYPE_CHECKING:
    from bt_tables import StepTables

HostInts: TypeAlias = Sequence[int] | NDArray[np.integer] | torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBatch:
    """One step's batch as all cache groups share it: what does not depend on a group.

    The fields are those of ``CommonAttentionMetadata``, where they are described.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    query_start_loc_host: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_upper_bound_host: torch.Tensor
    num_computed_tokens: torch.Tensor
    num_accepted_tokens: torch.Tensor
    is_prefilling: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def from_lengths(
        cls,
        num_computed_tokens: HostInts,
        query_lens: HostInts,
        is_prefilling: Sequence[bool] | torch.Tensor,
        device: torch.device | str,
        *,
        num_accepted_tokens: HostInts | None = None,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
    ) -> AttentionBatch:
        """Return the batch of requests whose lengths the host knows.

        An engine that keeps the batch's arrays on the device makes its ``AttentionBatch``
        of those instead; this copies five small arrays.

        Args:
            num_computed_tokens: [N] ints on the host; tokens of each request before this step.
            query_lens: [N] ints on the host; its tokens in this step, drafts included.
            is_prefilling: [N] bools; whether these tokens were given.
            device: Where the batch lies.
            num_accepted_tokens: [N] ints; tokens of the last step that stayed; 1 without.
            num_reqs_padded: Rows of the batch, padding included.
            num_tokens_padded: Tokens of the batch, padding included.

        Raises:
            InvalidEditError: The arrays differ in length, hold what is no int32 or a negative
                number, or a padded count is below the real one.
            InvalidSpecError: ``device`` cannot be used.
        """
        where = indexed_device(device)
        computed = _host_ints("num_computed_tokens", num_computed_tokens)
        queries = _host_ints("query_lens", query_lens)
        num_reqs, num_tokens = computed.size, int(queries.sum())
        given = [1] * num_reqs if num_accepted_tokens is None else num_accepted_tokens
        accepted = _host_ints("num_accepted_tokens", given)
        prefilling = torch.as_tensor(is_prefilling).to(torch.bool)
        sizes = {"query_lens": queries.size, "num_accepted_tokens": accepted.size}
        for name, size in {**sizes, "is_prefilling": prefilling.numel()}.items():
            if size != num_reqs:
                raise InvalidEditError(
                    f"{name} has {size} entries, num_computed_tokens has {num_reqs}",
                    name=name,
                    size=size,
                    num_reqs=num_reqs,
                )
        rows = _padded_count("num_reqs_padded", num_reqs_padded, num_reqs)
        tokens = _padded_count("num_tokens_padded", num_tokens_padded, num_tokens)
        starts = np.zeros(rows + 1, dtype=np.int32)
        starts[1 : num_reqs + 1] = queries.cumsum()
        starts[num_reqs + 1 :] = num_tokens
        lens = computed + queries
        positions = np.full(tokens, -1, dtype=np.int64)
        positions[:num_tokens] = np.arange(num_tokens) + (computed - starts[:num_reqs]).repeat(
            queries
        )
        is_given = torch.zeros(rows, dtype=torch.bool)
        is_given[:num_reqs] = prefilling
        starts_host = torch.from_numpy(starts)
        lens_host = _padded(lens, rows, 0)
        return cls(
            num_reqs=rows,
            num_tokens=tokens,
            max_query_len=int(queries.max(initial=0)),
            max_seq_len=int(lens.max(initial=0)),
            query_start_loc=starts_host.to(where),
            query_start_loc_host=starts_host,
            seq_lens=lens_host.to(where),
            seq_lens_upper_bound_host=lens_host,
            num_computed_tokens=_padded(computed, rows, 0).to(where),
            num_accepted_tokens=_padded(accepted, rows, 1).to(where),
            is_prefilling=is_given,
            positions=torch.from_numpy(positions).to(where),
        )


def _host_ints(name: str, values: HostInts) -> NDArray[np.int64]:
    """Return ``values`` as int64, once it is known that each is an int32 that counts something."""
    found = np.asarray(values)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise InvalidEditError(
            f"{name} must be a list or an array of ints with one dimension", name=name
        )
    ints = found.astype(np.int64)
    if ints.min(initial=0) < 0 or ints.max(initial=0) > np.iinfo(np.int32).max:
        raise InvalidEditError(f"{name} must hold counts in 0..2**31 - 1", name=name)
    return ints


def _padded_count(name: str, padded: int | None, real: int) -> int:
    if padded is None:
        return real
    if type(padded) is not int or padded < real:
        raise InvalidEditError(
            f"{name} must be an int of at least {real}, what the batch holds, not {padded!r}",
            name=name,
            padded=padded,
            real=real,
        )
    return padded


def _padded(values: NDArray[np.int64], size: int, fill: int) -> torch.Tensor:
    """Return ``values`` as int32 with ``fill`` behind them, on the host."""
    padded = np.full(size, fill, dtype=np.int32)
    padded[: values.size] = values
    return torch.from_numpy(padded)


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

    @classmethod
    def from_step(
        cls, layout: BlockTableLayout, tables: StepTables, group: int, batch: AttentionBatch
    ) -> CommonAttentionMetadata:
        """Return what the builders of a group are given, from what a table update returned.

        Args:
            layout: The group's plan.
            tables: What ``StagedBlockTables.step`` returned for this batch.
            group: The group's place among the tables.
            batch: The step's batch, the same for all groups.

        Raises:
            InvalidSpecError: An argument has the wrong type or there is no such group.
        """
        require_layout(layout)
        if not isinstance(batch, AttentionBatch):
            raise InvalidSpecError(
                f"batch must be an AttentionBatch, not {type(batch).__name__}", value=batch
            )
        block_tables = getattr(tables, "block_tables", None)
        if block_tables is None:
            raise InvalidSpecError(
                f"tables must be StepTables, not {type(tables).__name__}", value=tables
            )
        if type(group) is not int or not 0 <= group < len(block_tables):
            raise InvalidSpecError(
                f"group must be an int in 0..{len(block_tables) - 1}, not {group!r}", group=group
            )
        return cls(
            layout=layout,
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc=batch.query_start_loc,
            query_start_loc_host=batch.query_start_loc_host,
            seq_lens=batch.seq_lens,
            seq_lens_upper_bound_host=batch.seq_lens_upper_bound_host,
            local_seq_lens=local_lengths(batch.seq_lens, layout),
            num_computed_tokens=batch.num_computed_tokens,
            num_accepted_tokens=batch.num_accepted_tokens,
            is_prefilling=batch.is_prefilling,
            positions=batch.positions,
            block_table=block_tables[group],
            slot_mapping=tables.slot_mappings[group],
        )
