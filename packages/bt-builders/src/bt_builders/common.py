"""What builders of a cache group are given for one step, and what of its lengths a rank keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bt_tables.reference.addressing import local_lengths as addressed_lengths
from bt_width import Addressing, BlockTableLayout, InvalidSpecError

from ._checks import require_layout
from .batch import AttentionBatch

if TYPE_CHECKING:
    from bt_tables import StepTables


class QueryLens(NamedTuple):
    """How many tokens each row has in this step.

    Attributes:
        of_rows: [N] int32.
        shortest: The least of them; 0 without rows.
        longest: The most of them; 0 without rows.
    """

    of_rows: NDArray[np.int32]
    shortest: int
    longest: int


class GuardMark(NamedTuple):
    """What a guard leaves at a batch that is as planned.

    Attributes:
        layout: The plan it was compared with.
        device: Where its tensors lie.
        query_lens: The tokens of its rows.
    """

    layout: BlockTableLayout
    device: torch.device
    query_lens: QueryLens


class _Checked:
    """Carries the mark of a batch that a guard has let pass; no field of the batch."""

    __slots__ = ("_mark",)
    _mark: GuardMark


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommonAttentionMetadata(_Checked):
    """One step's batch as one cache group sees it.

    Where a feature is off its field holds its neutral value: no field is optional.
    An object is one step's: builders of a group check it once and trust it then, so that a
    step whose arrays were written in place needs a new one.
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
            InvalidSpecError: An argument has the wrong type, or ``group`` is out of range.
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


def require_common(common: object) -> None:
    """Refuse anything but a batch that holds a layout."""
    if not isinstance(common, CommonAttentionMetadata):
        raise InvalidSpecError(
            f"a batch must be CommonAttentionMetadata, not {type(common).__name__}", value=common
        )
    require_layout(common.layout)


def query_lens_of(common: CommonAttentionMetadata) -> QueryLens:
    """Return the tokens of each row in this step; a guard has counted them already."""
    mark: GuardMark | None = getattr(common, "_mark", None)
    return count_query_lens(common) if mark is None else mark.query_lens


def count_query_lens(common: CommonAttentionMetadata) -> QueryLens:
    """Count the tokens of each row by where rows begin on the host."""
    starts: NDArray[np.int32] = common.query_start_loc_host.numpy()
    of_rows = starts[1:] - starts[:-1]
    if not of_rows.size:
        return QueryLens(of_rows, 0, 0)
    # the method ``min`` is Python around this call, and takes longer than the numbers
    return QueryLens(of_rows, int(np.minimum.reduce(of_rows)), int(np.maximum.reduce(of_rows)))


def local_lengths(seq_lens: torch.Tensor, layout: BlockTableLayout) -> torch.Tensor:
    """Return how many tokens of each length this rank keeps, as ``layout.local_length`` says.

    Args:
        seq_lens: Lengths of any shape, int32, on any device.
        layout: The group's plan.

    Returns:
        A new tensor like ``seq_lens``; ``seq_lens`` itself where nothing is sharded.

    Raises:
        InvalidSpecError: An argument has the wrong type or dtype.
    """
    require_layout(layout)
    found = seq_lens.dtype if isinstance(seq_lens, torch.Tensor) else type(seq_lens).__name__
    if found != torch.int32:
        raise InvalidSpecError(f"seq_lens must be an int32 tensor, not {found}", value=seq_lens)
    return localise(seq_lens, layout.addressing)


def localise(lengths: torch.Tensor, addressing: Addressing) -> torch.Tensor:
    """Return the tokens of each length that this rank keeps; ``lengths`` itself if it is all."""
    return lengths if addressing.shards == 1 else addressed_lengths(addressing, lengths)


def local_lengths_of_ranks(seq_lens: torch.Tensor, layout: BlockTableLayout) -> torch.Tensor:
    """Return how many tokens of each length every rank keeps: a row for each rank.

    Args:
        seq_lens: [N] int32, on any device.
        layout: The group's plan on any rank.

    Returns:
        [shards, N] int32; one row where nothing is sharded.

    Raises:
        InvalidSpecError: An argument has the wrong type or dtype.
    """
    local_lengths(seq_lens, layout)
    addressing = layout.addressing
    ranks = range(addressing.shards)
    return torch.stack([addressed_lengths(addressing, seq_lens, rank) for rank in ranks])


def most_local_states(addressing: Addressing, tokens_per_state: int, num_tokens: int) -> int:
    """Return the states of ``num_tokens`` tokens on the rank that keeps most of them.

    The same on every rank, so that ranks which plan by it plan alike.
    """
    if addressing.shards == 1:
        return num_tokens // tokens_per_state
    # the first rank's turn comes first, so that none has more
    return int(addressed_lengths(addressing, np.asarray(num_tokens), 0)) // tokens_per_state
