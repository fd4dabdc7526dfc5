"""Defines what every builder of a cache group is given for one step: how it is made and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from bt_tables.reference.addressing import local_lengths as addressed_lengths
from bt_width import (
    Addressing,
    BlockTableLayout,
    InvalidEditError,
    InvalidSpecError,
    RowOverflowError,
    WidthMismatchError,
)

from ._checks import indexed_device, require_layout, require_tensor

if TYPE_CHECKING:
    from bt_tables import StepTables

HostInts: TypeAlias = Sequence[int] | NDArray[np.integer] | torch.Tensor

_HOST = torch.device("cpu")


class GuardMark(NamedTuple):
    """What a guard leaves at a batch that is as planned.

    Attributes:
        layout: The plan it was compared with.
        device: Where its tensors lie.
        query_lens: [N] int32; tokens of each row in this step.
    """

    layout: BlockTableLayout
    device: torch.device
    query_lens: NDArray[np.int32]


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
            InvalidEditError: The arrays differ in length, hold what is not an int32 or a negative
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


class BatchGuard:
    """Refuses a batch whose tensors are not those that a builder was planned for.

    The planned numbers are taken from the layout once. A check reads what lies on the
    host, and of the device's tensors what the host knows of them: no element.

    Any thread may use it: it keeps nothing of a batch.

    Attributes:
        layout: The group's plan.
        device: Where the batch lies, with its index.
    """

    def __init__(self, layout: BlockTableLayout, device: torch.device | str) -> None:
        """Plan for the batches of ``layout`` on ``device``.

        Raises:
            InvalidSpecError: ``layout`` is not a layout, or ``device`` cannot be used.
        """
        require_layout(layout)
        self.layout = layout
        self.device = indexed_device(device)
        self._width = layout.width
        self._max_num_reqs = layout.limits.max_num_reqs
        self._max_num_tokens = layout.limits.max_num_batched_tokens
        self._max_request_len = layout.limits.max_tokens

    def check(self, common: CommonAttentionMetadata) -> None:
        """Refuse ``common`` unless every tensor is as planned; one that passed is not read again.

        Raises:
            WidthMismatchError: It was planned otherwise, or a tensor has other rows,
                columns, dtype, device or strides; the message holds both derivations.
            InvalidEditError: It has more rows or tokens than the plan allows, or its
                numbers on the host contradict each other.
            RowOverflowError: A request is longer than a row was planned for.
            InvalidSpecError: It is not a batch.
        """
        mark = getattr(common, "_mark", None)
        if mark is not None and mark.layout is self.layout and mark.device == self.device:
            return
        require_common(common)
        if common.layout is not self.layout and common.layout != self.layout:
            raise WidthMismatchError(
                "the batch and the builder were planned differently: "
                f"the batch: {common.layout.explain()}; the builder: {self.layout.explain()}",
                batch=common.layout,
                builder=self.layout,
            )
        self._check_counts(common)
        self._check_tensors(common)
        query_lens = self._check_host_numbers(common)
        object.__setattr__(common, "_mark", GuardMark(self.layout, self.device, query_lens))

    def _check_counts(self, common: CommonAttentionMetadata) -> None:
        counts = (
            ("num_reqs", common.num_reqs, self._max_num_reqs),
            ("num_tokens", common.num_tokens, self._max_num_tokens),
            ("max_query_len", common.max_query_len, self._max_num_tokens),
        )
        for name, count, limit in counts:
            if type(count) is not int or not 0 <= count <= limit:
                raise InvalidEditError(
                    f"{name} must be an int in 0..{limit}, the limit planned for, not {count!r}",
                    name=name,
                    count=count,
                    limit=limit,
                )
        longest, limit = common.max_seq_len, self._max_request_len
        if type(longest) is not int or not 0 <= longest <= limit:
            raise RowOverflowError(
                f"max_seq_len must be an int in 0..{limit}, what a row is planned for, "
                f"not {longest!r}: {self.layout.explain()}",
                max_seq_len=longest,
                max_tokens=limit,
            )

    def _check_host_numbers(self, common: CommonAttentionMetadata) -> NDArray[np.int32]:
        """Return the tokens of each row, once starts ascend and bounds are bounds."""
        starts: NDArray[np.int32] = common.query_start_loc_host.numpy()
        query_lens: NDArray[np.int32] = starts[1:] - starts[:-1]
        bounds = common.seq_lens_upper_bound_host.numpy()
        ascend = starts[0] == 0 and starts[-1] <= common.num_tokens
        if not ascend or query_lens.min(initial=0) < 0:
            raise InvalidEditError(
                f"query_start_loc_host must ascend from 0 to at most {common.num_tokens}, "
                f"it is {starts.tolist()}",
                query_start_loc=starts.tolist(),
            )
        stated_counts = (
            ("max_query_len", query_lens.max(initial=0), common.max_query_len),
            ("max_seq_len", bounds.max(initial=0), common.max_seq_len),
        )
        for name, found, stated in stated_counts:
            if found > stated:
                raise InvalidEditError(
                    f"{name} is {stated}, but a request has {found}", name=name, found=int(found)
                )
        if (bounds < query_lens).any():
            raise InvalidEditError(
                "a request has more tokens in this step than seq_lens_upper_bound_host in all: "
                f"{query_lens.tolist()} and {bounds.tolist()}",
                query_lens=query_lens.tolist(),
                bounds=bounds.tolist(),
            )
        return query_lens

    def _check_tensors(self, common: CommonAttentionMetadata) -> None:
        """Refuse a tensor of another shape, dtype, device or stride than planned."""
        reqs, tokens = (common.num_reqs,), (common.num_tokens,)
        starts, table = (common.num_reqs + 1,), (common.num_reqs, self._width)
        # the table first: its message says how the width came about
        self._check(common.block_table, "block_table", table, torch.int32, self.device)
        self._check(common.query_start_loc, "query_start_loc", starts, torch.int32, self.device)
        self._check(common.query_start_loc_host, "query_start_loc_host", starts, torch.int32, _HOST)
        self._check(common.seq_lens, "seq_lens", reqs, torch.int32, self.device)
        self._check(
            common.seq_lens_upper_bound_host, "seq_lens_upper_bound_host", reqs, torch.int32, _HOST
        )
        self._check(common.local_seq_lens, "local_seq_lens", reqs, torch.int32, self.device)
        self._check(
            common.num_computed_tokens, "num_computed_tokens", reqs, torch.int32, self.device
        )
        self._check(
            common.num_accepted_tokens, "num_accepted_tokens", reqs, torch.int32, self.device
        )
        self._check(common.is_prefilling, "is_prefilling", reqs, torch.bool, _HOST)
        self._check(common.positions, "positions", tokens, torch.int64, self.device)
        self._check(common.slot_mapping, "slot_mapping", tokens, torch.int64, self.device)

    def _check(
        self,
        tensor: torch.Tensor,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if (
            type(tensor) is torch.Tensor
            and tensor.shape == shape
            and tensor.dtype is dtype
            and tensor.device == device
            and tensor.is_contiguous()
        ):
            return
        derivation = self._derivation if name == "block_table" else None
        require_tensor(name, tensor, shape=shape, dtype=dtype, device=device, derivation=derivation)

    def _derivation(self) -> str:
        return f"the builder's columns are those of its layout: {self.layout.explain()}"


def require_common(common: object) -> None:
    """Refuse anything but a batch that holds a layout."""
    if not isinstance(common, CommonAttentionMetadata):
        raise InvalidSpecError(
            f"a batch must be CommonAttentionMetadata, not {type(common).__name__}", value=common
        )
    require_layout(common.layout)


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


def query_lens_of(common: CommonAttentionMetadata) -> NDArray[np.int32]:
    """Return the tokens of each row in this step: [N] int32."""
    mark = getattr(common, "_mark", None)
    if mark is not None:
        return cast(GuardMark, mark).query_lens
    starts: NDArray[np.int32] = common.query_start_loc_host.numpy()
    return starts[1:] - starts[:-1]
