"""Builds Mamba's metadata: which states each request reads and writes, how its scan is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from bt_width import NULL_BLOCK, BlockTableLayout, InvalidEditError, InvalidSpecError, MambaSpec
from bt_width.specs import layers_of

from ._checks import require_positive, require_tensor
from ._support import LeadingParts, kept, operations_for, to_device, with_options
from .common import CommonAttentionMetadata, query_lens_of
from .guard import BatchGuard
from .operations import CommittedStates, MambaStates, StateBatch
from .split import BatchSplit, leading_true, split_at

_Ints: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaOptions:
    """The choices of one Mamba backend.

    Attributes:
        chunk_size: Tokens of a chunk of the prefill scan.
        state_pad: The state id that means "none" to the kernels: ``NULL_BLOCK``, which
            is a real state that nothing reads, or -1.
    """

    chunk_size: int = 256
    state_pad: int = NULL_BLOCK

    def __post_init__(self) -> None:
        """Refuse a chunk that holds nothing and a pad that names a state."""
        require_positive("chunk_size", self.chunk_size)
        if type(self.state_pad) is not int or self.state_pad not in (NULL_BLOCK, -1):
            raise InvalidSpecError(
                f"state_pad must be {NULL_BLOCK} or -1, not {self.state_pad!r}: any other id is "
                "some request's state",
                value=self.state_pad,
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MambaChunks:
    """How the prefilling tokens are cut for the scan; a chunk never crosses requests.

    A request's first chunk completes the chunk that its earlier tokens began.

    Attributes:
        cu_chunk_seqlens: [C + 1] int32; where each chunk begins among those tokens.
        last_chunk_indices: [P] int32; each request's last chunk, -1 where it has none.
        seq_idx: [C] int32; each chunk's request.
    """

    cu_chunk_seqlens: torch.Tensor
    last_chunk_indices: torch.Tensor
    seq_idx: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MambaDecodeMetadata:
    """The decoding part.

    Attributes:
        num_reqs: Requests (D), padding included.
        num_tokens: Tokens, padding included.
        max_query_len: The most tokens of one request.
        is_uniform: Whether every request has that many.
        query_start_loc: [D + 1] int32.
        states: Where their states are.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    is_uniform: bool
    query_start_loc: torch.Tensor
    states: MambaStates


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MambaPrefillMetadata:
    """The prefilling part.

    Attributes:
        first_req: The first request's row in the batch.
        num_reqs: Requests (P).
        first_token: The first token's place in the batch.
        num_tokens: Tokens.
        query_start_loc: [P + 1] int32; counted from ``first_token``.
        states: Where their states are.
        chunks: How their tokens are cut.
    """

    first_req: int
    num_reqs: int
    first_token: int
    num_tokens: int
    query_start_loc: torch.Tensor
    states: MambaStates
    chunks: MambaChunks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MambaMetadata:
    """One step of Mamba: decodes first, then prefills; a part may be empty.

    Attributes:
        states: Where the states of the whole batch are.
        decode: The decoding part.
        prefill: The prefilling part.
    """

    states: MambaStates
    decode: MambaDecodeMetadata
    prefill: MambaPrefillMetadata


class MambaMetadataBuilder:
    """Builds a recurrent group's metadata; its states' ids stand in own buffers.

    A row decodes if its tokens were not given and are at most one and its drafts, or if it
    continues a prompt by one token; the rest of a prompt prefills, however short.

    Belongs to one thread at a time; those of other groups and micro-batches run beside it.

    Attributes:
        options: What the backend's kernels want; see ``configured``.
    """

    requires_block_table_width: ClassVar[Literal[False]] = False
    cudagraph_support: ClassVar[Literal["uniform"]] = "uniform"
    options: ClassVar[MambaOptions] = MambaOptions()

    def __init__(self, layout: BlockTableLayout, device: torch.device | str) -> None:
        """Allocate for the largest step that ``layout`` allows.

        Raises:
            InvalidSpecError: The group keeps no recurrent state, or fewer speculative
                states than there are draft tokens.
        """
        self.layout = layout
        self._guard = BatchGuard(layout, device)
        self._device = device = self._guard.device
        _require_states(layout)
        self._addressing = layout.addressing
        self._operations = operations_for(device)
        self._max_decode_len = 1 + layout.limits.num_speculative_tokens
        num_reqs, num_states = layout.limits.max_num_reqs, self._addressing.states_per_step
        # columns that a step may complete: as many copies may accepted tokens call for
        num_copies = -(-num_states // self._addressing.tokens_per_state_column)
        ints = torch.zeros(3, num_reqs, dtype=torch.int32, device=device)
        bools = torch.zeros(2, num_reqs, dtype=torch.bool, device=device)
        copies = torch.zeros(2, num_reqs, num_copies, dtype=torch.int32, device=device)
        self._states = LeadingParts(
            MambaStates(
                source_ids=ints[0],
                state_ids=torch.zeros(num_reqs, num_states, dtype=torch.int32, device=device),
                num_accepted_tokens=ints[1],
                has_initial_states=bools[0],
                copies=bools[1],
            )
        )
        self._committed = LeadingParts(CommittedStates(copies[0], copies[1], ints[2]))
        nothing = np.zeros(0, dtype=np.int32)
        self._no_chunks = self._chunks(nothing, nothing)
        self._no_starts = torch.zeros(1, dtype=torch.int32, device=device)
        self._no_prefill = kept(
            _no_prefill, self._no_starts, self._states.first(0), self._no_chunks
        )

    @classmethod
    def configured(cls, options: MambaOptions) -> type[Self]:
        """Return this builder's class with other ``options``.

        Raises:
            InvalidSpecError: They are no ``MambaOptions``.
        """
        return with_options(cls, options, MambaOptions)

    def build(self, common: CommonAttentionMetadata) -> MambaMetadata:
        """Return the metadata of one step; valid until the next one is built.

        Raises:
            WidthMismatchError: A tensor of ``common`` is not as planned; nothing changed.
            InvalidEditError: The batch is larger than planned, or a request with drafts
                stands behind one that prefills; nothing changed.
            RowOverflowError: A request is longer than a row was planned for; nothing changed.
        """
        self._guard.check(common)
        split = self._split(common)
        num_decodes = split.num_decodes
        states = self._states.first(common.num_reqs)
        self._operations.state_ids(
            self._addressing, self.options.state_pad, _state_batch(common), states
        )
        decode_states, starts = states, common.query_start_loc
        if num_decodes < common.num_reqs:
            decode_states, starts = self._states.first(num_decodes), starts[: num_decodes + 1]
        return MambaMetadata(
            states=states,
            decode=MambaDecodeMetadata(
                num_reqs=num_decodes,
                num_tokens=split.num_decode_tokens,
                max_query_len=split.decode_query_len,
                is_uniform=split.is_uniform,
                query_start_loc=starts,
                states=decode_states,
            ),
            prefill=self._build_prefill(common, split, states),
        )

    def commit_states(
        self, common: CommonAttentionMetadata, num_accepted_tokens: torch.Tensor
    ) -> CommittedStates:
        """Return what to copy once it is known how many tokens of ``common`` stay.

        Afterwards every column that later steps, or requests with the same prefix, look in
        holds the state that it promises: one at every ``block_size`` tokens.

        Args:
            common: The step's batch.
            num_accepted_tokens: [N] int32; tokens of this step that stay, the sampled one
                of a decode included.

        Raises:
            WidthMismatchError: A tensor is not as planned.
            InvalidEditError: As for ``build``.
            RowOverflowError: As for ``build``.
        """
        self._guard.check(common)
        require_tensor(
            "num_accepted_tokens",
            num_accepted_tokens,
            shape=(common.num_reqs,),
            dtype=torch.int32,
            device=self._device,
        )
        num_decodes, pad = self._split(common).num_decodes, self.options.state_pad
        committed = self._committed.first(common.num_reqs)
        self._operations.commit_states(
            self._addressing,
            pad,
            _state_batch(common, num_decodes),
            num_accepted_tokens[:num_decodes],
            self._committed.first(num_decodes),
        )
        if num_decodes < common.num_reqs:
            committed.source_ids[num_decodes:].fill_(pad)
            committed.target_ids[num_decodes:].fill_(pad)
            committed.num_accepted_tokens[num_decodes:].fill_(1)
        return committed

    def rebind(self) -> None:
        """Write the builder's constants and buffers anew, in place, after memory was lost."""
        self._states.fill(0)
        self._committed.fill(0)
        self._no_starts.zero_()
        nothing = np.zeros(0, dtype=np.int32)
        fresh = self._chunks(nothing, nothing)
        self._no_chunks.cu_chunk_seqlens.copy_(fresh.cu_chunk_seqlens)

    def _split(self, common: CommonAttentionMetadata) -> BatchSplit:
        query_lens = query_lens_of(common)
        is_prefilling = common.is_prefilling.numpy()
        # counted, not asked for any: a third of the time
        if common.max_query_len <= self._max_decode_len and not np.count_nonzero(is_prefilling):
            return split_at(common, query_lens, common.num_reqs)
        lens = query_lens.of_rows
        has_state = common.seq_lens_upper_bound_host.numpy() > lens
        decodes = (lens == 0) | (
            (lens <= self._max_decode_len) & (~is_prefilling | (has_state & (lens == 1)))
        )
        split = split_at(common, query_lens, leading_true(decodes))
        behind = slice(split.num_decodes, None)
        if (~is_prefilling[behind] & (lens[behind] > 1)).any():
            raise InvalidEditError(
                f"a request with drafts stands behind row {split.num_decodes}, which prefills; "
                "its drafts' states would be lost: put all decodes before all prefills",
                first_prefill=split.num_decodes,
            )
        return split

    def _build_prefill(
        self, common: CommonAttentionMetadata, split: BatchSplit, states: MambaStates
    ) -> MambaPrefillMetadata:
        """Return the prefilling part; where nothing prefills, of constants alone."""
        if not split.num_prefills:
            return self._no_prefill(split.num_decodes, split.num_decode_tokens)
        reqs = split.prefill_reqs
        starts = common.query_start_loc[reqs.start : reqs.stop + 1] - split.num_decode_tokens
        query_lens = query_lens_of(common).of_rows[reqs]
        lens = common.seq_lens_upper_bound_host.numpy()[reqs]
        return MambaPrefillMetadata(
            first_req=reqs.start,
            num_reqs=split.num_prefills,
            first_token=split.num_decode_tokens,
            num_tokens=split.num_prefill_tokens,
            query_start_loc=starts,
            states=MambaStates(*(each[reqs] for each in states)),
            chunks=self._chunks(query_lens, lens - query_lens),
        )

    def _chunks(
        self, query_lens: NDArray[np.int32], num_computed: NDArray[np.int32]
    ) -> MambaChunks:
        cut = cut_chunks(query_lens, num_computed, self.options.chunk_size)
        # one copy to the device instead of three
        numbers = to_device(np.concatenate(cut), self._device)
        starts_end, lasts_end = np.cumsum([cut.cu_chunk_seqlens.size, cut.last_chunk_indices.size])
        return MambaChunks(
            cu_chunk_seqlens=numbers[:starts_end],
            last_chunk_indices=numbers[starts_end:lasts_end],
            seq_idx=numbers[lasts_end:],
        )


def _state_batch(common: CommonAttentionMetadata, num_reqs: int | None = None) -> StateBatch:
    """Return what the states of a batch, or of its first rows, follow from."""
    batch = StateBatch(
        common.block_table,
        common.num_computed_tokens,
        common.seq_lens,
        common.num_accepted_tokens,
    )
    if num_reqs is None or num_reqs == common.num_reqs:
        return batch
    return StateBatch(*(each[:num_reqs] for each in batch))


def _no_prefill(
    no_starts: torch.Tensor,
    no_states: MambaStates,
    no_chunks: MambaChunks,
    num_reqs: int,
    num_decode_tokens: int,
) -> MambaPrefillMetadata:
    """Return the prefilling part of a batch that only decodes."""
    return MambaPrefillMetadata(
        first_req=num_reqs,
        num_reqs=0,
        first_token=num_decode_tokens,
        num_tokens=0,
        query_start_loc=no_starts,
        states=no_states,
        chunks=no_chunks,
    )


def _require_states(layout: BlockTableLayout) -> None:
    """Refuse a group that is not planned for recurrent states and its drafts.

    Raises:
        InvalidSpecError: The group is of another kind, or has fewer speculative states
            than the limits have draft tokens.
    """
    spec = layers_of(layout.spec)[0]
    if not isinstance(spec, MambaSpec):
        raise InvalidSpecError(
            f"a Mamba builder needs a group of recurrent states, not of kind {layout.kind}",
            layout=layout,
        )
    num_drafts = layout.limits.num_speculative_tokens
    if spec.num_speculative_blocks < num_drafts:
        raise InvalidSpecError(
            f"{num_drafts} draft tokens need as many speculative states, the spec has "
            f"{spec.num_speculative_blocks}: give MambaSpec num_speculative_blocks={num_drafts}",
            num_speculative_tokens=num_drafts,
            num_speculative_blocks=spec.num_speculative_blocks,
        )


class ChunkCut(NamedTuple):
    """Chunks in host numbers; see ``MambaChunks``."""

    cu_chunk_seqlens: _Ints
    last_chunk_indices: _Ints
    seq_idx: _Ints


def cut_chunks(query_lens: _Ints, num_computed_tokens: _Ints, chunk_size: int) -> ChunkCut:
    """Cut each request's tokens at multiples of ``chunk_size`` of its own positions.

    Args:
        query_lens: [P]; tokens of each request in this step.
        num_computed_tokens: [P]; tokens of each request before it.
        chunk_size: Tokens of a full chunk.
    """
    begun = num_computed_tokens % chunk_size
    # chunks of positions 0..begun + query_len - 1; those before `begun` are all in the first
    num_chunks = (-(-(begun + query_lens) // chunk_size)).astype(np.int32)
    num_chunks[query_lens == 0] = 0
    ends = num_chunks.cumsum(dtype=np.int32)
    req_of_chunk = np.arange(query_lens.size, dtype=np.int32).repeat(num_chunks)
    ordinal = np.arange(req_of_chunk.size, dtype=np.int32) - (ends - num_chunks)[req_of_chunk]
    token_ends = query_lens.cumsum(dtype=np.int32)
    first_tokens = (token_ends - query_lens)[req_of_chunk]
    starts = first_tokens + np.maximum(ordinal * chunk_size - begun[req_of_chunk], 0)
    total = token_ends[-1:] if token_ends.size else np.zeros(1, dtype=np.int32)
    return ChunkCut(
        np.concatenate([starts, total]).astype(np.int32, copy=False),
        np.where(num_chunks > 0, ends - 1, -1).astype(np.int32, copy=False),
        req_of_chunk,
    )
