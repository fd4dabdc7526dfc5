"""Builds the DSA indexer's metadata: lengths and rows per token, keys per completed state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self, TypeAlias

import torch

from bt_width import (
    NULL_BLOCK,
    Addressing,
    BlockTableLayout,
    BlockTableWidth,
    InvalidSpecError,
    WidthMismatchError,
    index_buffer_bytes,
    row_bytes,
)

from ._checks import as_tuple, require_layout, require_positive
from ._support import LeadingParts, with_options
from .common import CommonAttentionMetadata, localise, most_local_states, query_lens_of
from .drafts import SlotBuilder
from .operations import DraftRows, ExpandedRows, TokenLens
from .split import BatchSplit, split_batch

_LOGIT_BYTES = 4

DecodeForm: TypeAlias = Literal["plain", "native", "flattened"]
"""One token a row; several tokens a row, of one request; one row a token, copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DSAOptions:
    """The choices of one indexer backend.

    Attributes:
        native_query_lens: Tokens of a request that the decode kernel takes in one row;
            other batches are flattened to one row a token.
        workspace_tokens: Tokens whose keys a prefill chunk of several requests gathers.
        max_logits_bytes: Bytes of float32 scores that a prefill chunk may need.
        member: The layer of a ``UniformSpec`` whose ``tokens_per_state`` counts, where
            its members differ.
    """

    native_query_lens: frozenset[int] = frozenset({1, 2})
    workspace_tokens: int = 65_536
    max_logits_bytes: int = 512 * 2**20
    member: str | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that hold nothing and query lengths that are none."""
        require_positive("workspace_tokens", self.workspace_tokens)
        require_positive("max_logits_bytes", self.max_logits_bytes)
        for query_len in as_tuple("native_query_lens", self.native_query_lens):
            require_positive("a native query length", query_len)
        object.__setattr__(self, "native_query_lens", frozenset(self.native_query_lens))
        if not isinstance(self.member, str | None):
            raise InvalidSpecError(
                f"member must be a name or None, not {self.member!r}", value=self.member
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DSADecodeMetadata:
    """The decoding part of a batch; every tensor has the same number of rows (B).

    Lengths count what a token sees, itself included; padding rows hold 0 and a null row.

    Attributes:
        form: How rows stand for tokens.
        num_tokens: Decode tokens, padding included: ``B * M``.
        query_len: Tokens of a row (M); 1 unless ``form`` is "native".
        block_table: [B, W] int32; the group's own table unless ``form`` is "flattened".
        seq_lens: [B, M] int32; states on this rank.
        global_seq_lens: [B, M] int32; tokens on all ranks.
        max_seq_len: An upper bound of ``seq_lens``, equal on all ranks.
    """

    form: DecodeForm
    num_tokens: int
    query_len: int
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    global_seq_lens: torch.Tensor
    max_seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DSAPrefillChunk:
    """Some prefilling requests, or some tokens of one, that are scored together.

    The keys of its requests stand one after the other in a workspace, states of this
    rank only. A request longer than the workspace stands alone and needs ``num_keys``.

    Attributes:
        first_req: The first request's row in the batch.
        num_reqs: Requests (P).
        first_token: The first token's place in the batch.
        num_tokens: Query tokens (Q).
        num_keys: An upper bound of the keys, equal on all ranks.
        gathers_keys: Whether the workspace must be filled; False where the chunk before
            held the same keys.
        block_table: [P, W] int32.
        cu_seq_lens: [P + 1] int32; where each request's keys begin in the workspace.
        token_to_req: [Q] int32; each token's request, counted from ``first_req``.
        cu_seqlen_ks: [Q] int32; the first key that a token sees, in the workspace.
        cu_seqlen_ke: [Q] int32; one past the last.
    """

    first_req: int
    num_reqs: int
    first_token: int
    num_tokens: int
    num_keys: int
    gathers_keys: bool
    block_table: torch.Tensor
    cu_seq_lens: torch.Tensor
    token_to_req: torch.Tensor
    cu_seqlen_ks: torch.Tensor
    cu_seqlen_ke: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DSAIndexerMetadata:
    """One step of the DSA indexer: decodes first, then chunks of prefills.

    Attributes:
        kernel_block_size: Tokens of a column.
        tokens_per_state: Tokens that share one stored key.
        slot_mapping: [T] int64; the slot of the key that a token completes.
        positions: [T] int64; each token's place in its request, counted over all ranks;
            below 0 for a padding row of draft steps.
        num_decodes: Requests that decode, padding included.
        num_prefills: Requests that prefill.
        decode: The decoding part; no rows where nothing decodes.
        prefill: The prefilling part.
    """

    kernel_block_size: int
    tokens_per_state: int
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    num_decodes: int
    num_prefills: int
    decode: DSADecodeMetadata
    prefill: tuple[DSAPrefillChunk, ...]

    @property
    def states_per_kernel_block(self) -> int:
        """Stored keys of a column: the page size that the table's ids count in."""
        return self.kernel_block_size // self.tokens_per_state


class DSAIndexerMetadataBuilder(SlotBuilder[DSAIndexerMetadata]):
    """Builds an indexer's metadata in buffers that are allocated once.

    It asks for the table's width because it keeps a table of its own: where a kernel
    takes one token a row, each token of a request needs a copy of the request's row.

    Belongs to one thread at a time; those of other groups and micro-batches run beside it.

    Attributes:
        options: What the backend's kernels can do; see ``configured``.
    """

    requires_block_table_width: ClassVar[Literal[True]] = True
    cudagraph_support: ClassVar[Literal["uniform"]] = "uniform"
    options: ClassVar[DSAOptions] = DSAOptions()

    def __init__(
        self,
        layout: BlockTableLayout,
        device: torch.device | str,
        *,
        block_table_width: BlockTableWidth,
    ) -> None:
        """Allocate for the largest step that ``layout`` allows.

        Raises:
            WidthMismatchError: ``block_table_width`` is not the layout's.
            InvalidSpecError: The group keeps no token of a request for long.
        """
        require_layout(layout)
        if type(block_table_width) is not int or block_table_width != layout.width:
            raise WidthMismatchError(
                f"block_table_width {block_table_width!r} is not the layout's {layout.width}: "
                f"{layout.explain()}",
                block_table_width=block_table_width,
                layout=layout,
            )
        if layout.slot_mode != "block":
            raise InvalidSpecError(
                f"an indexer needs every token's key; a {layout.kind} group keeps none for long",
                layout=layout,
            )
        super().__init__(layout, device, layout.tokens_per_state(self.options.member))
        self._max_decode_len = 1 + layout.limits.num_speculative_tokens
        self._native_query_lens = self.options.native_query_lens | {1}
        self._max_keys = max(self.options.workspace_tokens // self._tokens_per_state, 1)
        self._max_scores = max(self.options.max_logits_bytes // _LOGIT_BYTES, 1)
        # one row for each decode token that a step may hold
        self._max_rows = index_buffer_bytes(layout) // row_bytes(layout)
        ints = torch.zeros(3, self._max_rows, dtype=torch.int32, device=self._device)
        table = torch.zeros(self._max_rows, layout.width, dtype=torch.int32, device=self._device)
        self._lens = LeadingParts(TokenLens(ints[0], ints[1]))
        self._rows = LeadingParts(ExpandedRows(table, ints[2]))
        self._slots = torch.zeros(
            layout.limits.max_num_batched_tokens, dtype=torch.int64, device=self._device
        )

    @classmethod
    def configured(cls, options: DSAOptions) -> type[Self]:
        """Return this builder's class with other ``options``.

        Raises:
            InvalidSpecError: They are no ``DSAOptions``.
        """
        return with_options(cls, options, DSAOptions)

    def build(self, common: CommonAttentionMetadata) -> DSAIndexerMetadata:
        """Return the metadata of one step; valid until the next one is built.

        Raises:
            WidthMismatchError: A tensor of ``common`` is not as planned; nothing changed.
            InvalidEditError: The batch is larger than planned; nothing changed.
            RowOverflowError: A request is longer than a row was planned for; nothing changed.
        """
        self._guard.check(common)
        split = split_batch(common, self._max_decode_len).bounded(self._max_rows)
        return DSAIndexerMetadata(
            kernel_block_size=self._addressing.kernel_block_size,
            tokens_per_state=self._tokens_per_state,
            num_decodes=split.num_decodes,
            num_prefills=split.num_prefills,
            decode=self._build_decode(common, split),
            prefill=self._build_prefill(common, split) if split.num_prefills else (),
            slot_mapping=self._state_slots(common),
            positions=common.positions,
        )

    def rebind(self) -> None:
        """Write the builder's constants and buffers anew, in place, after memory was lost."""
        super().rebind()
        self._lens.fill(0)
        # rows and their counts agree again: a row is cleared as far as its count says
        self._rows.fill(NULL_BLOCK)
        self._slots.zero_()

    def _build_decode(
        self, common: CommonAttentionMetadata, split: BatchSplit
    ) -> DSADecodeMetadata:
        """Write the lengths of the decode tokens, and their rows where they need their own."""
        num_reqs, num_tokens = split.num_decodes, split.num_decode_tokens
        starts, seq_lens, table = common.query_start_loc, common.seq_lens, common.block_table
        if num_reqs < common.num_reqs:
            starts, seq_lens, table = starts[: num_reqs + 1], seq_lens[:num_reqs], table[:num_reqs]
        is_native = split.is_uniform and split.decode_query_len in self._native_query_lens
        query_len = split.decode_query_len if is_native else 1
        lens = self._lens.first(num_tokens)
        if is_native:
            self._operations.token_lens(
                self._addressing, self._tokens_per_state, starts, seq_lens, lens
            )
        else:
            rows = self._rows.first(num_tokens)
            self._operations.expand_rows(
                self._addressing, self._tokens_per_state, starts, seq_lens, table, lens, rows
            )
            table = rows.table
        lens_of_rows = self._lens.first(num_tokens, query_len)
        return DSADecodeMetadata(
            form=("plain" if query_len == 1 else "native") if is_native else "flattened",
            num_tokens=num_tokens,
            query_len=query_len,
            block_table=table,
            seq_lens=lens_of_rows.local_lens,
            global_seq_lens=lens_of_rows.seq_lens,
            max_seq_len=most_local_states(
                self._addressing, self._tokens_per_state, common.max_seq_len
            ),
        )

    def _build_prefill(
        self, common: CommonAttentionMetadata, split: BatchSplit
    ) -> tuple[DSAPrefillChunk, ...]:
        """Plan chunks on the host and describe them on the device, without waiting for it."""
        reqs = split.prefill_reqs
        bounds = common.seq_lens_upper_bound_host[reqs].tolist()
        key_lens = [
            most_local_states(self._addressing, self._tokens_per_state, bound) for bound in bounds
        ]
        plans = plan_prefill_chunks(
            query_lens_of(common).of_rows[reqs].tolist(), key_lens, self._max_keys, self._max_scores
        )
        view = _PrefillView(common, split, self._addressing, self._tokens_per_state)
        return tuple(view.describe(plan) for plan in plans)

    def _state_slots(self, common: CommonAttentionMetadata) -> torch.Tensor:
        if self._tokens_per_state == 1:
            return common.slot_mapping
        slots = self._slots[: common.num_tokens]
        self._operations.compress_slots(
            self._tokens_per_state, common.positions, common.slot_mapping, slots
        )
        return slots

    def _describe_drafts(self, block_table: torch.Tensor, rows: DraftRows) -> DSAIndexerMetadata:
        num_reqs = rows.seq_lens.numel()
        return DSAIndexerMetadata(
            kernel_block_size=self._addressing.kernel_block_size,
            tokens_per_state=self._tokens_per_state,
            num_decodes=num_reqs,
            num_prefills=0,
            decode=DSADecodeMetadata(
                form="plain",
                num_tokens=num_reqs,
                query_len=1,
                block_table=block_table,
                seq_lens=rows.local_lens.view(-1, 1),
                global_seq_lens=rows.seq_lens.view(-1, 1),
                max_seq_len=most_local_states(
                    self._addressing, self._tokens_per_state, self._addressing.max_tokens
                ),
            ),
            prefill=(),
            slot_mapping=rows.slot_mapping,
            positions=rows.positions,
        )


class ChunkPlan(NamedTuple):
    """One chunk in host numbers; requests count from the first that prefills.

    Attributes:
        first_req: The first request.
        num_reqs: Requests.
        first_token: The first token, counted from the first request's first.
        num_tokens: Tokens.
        num_keys: Keys of the requests, at most.
        gathers_keys: Whether they are not in the workspace already.
    """

    first_req: int
    num_reqs: int
    first_token: int
    num_tokens: int
    num_keys: int
    gathers_keys: bool


def plan_prefill_chunks(
    query_lens: Sequence[int], key_lens: Sequence[int], max_keys: int, max_scores: int
) -> list[ChunkPlan]:
    """Pack requests in order while their keys and their scores fit the budgets.

    A request whose scores alone do not fit is cut by its tokens; one whose keys alone
    do not fit stands alone; one without tokens is in no chunk.

    Args:
        query_lens: Tokens of each request in this step.
        key_lens: Keys of each request, at most.
        max_keys: Keys of a chunk of several requests.
        max_scores: Scores of a chunk: its tokens times its keys.

    Raises:
        InvalidSpecError: The lists differ in length, hold what is not an int, or a budget is not
            positive.
    """
    query_lens = as_tuple("query_lens", query_lens, int)
    key_lens = as_tuple("key_lens", key_lens, int)
    if len(query_lens) != len(key_lens) or min((*query_lens, *key_lens), default=0) < 0:
        raise InvalidSpecError(
            f"query_lens and key_lens must be counts of the same requests, not {len(query_lens)} "
            f"and {len(key_lens)} numbers of which the least is "
            f"{min((*query_lens, *key_lens), default=0)}",
            query_lens=query_lens,
            key_lens=key_lens,
        )
    require_positive("max_keys", max_keys)
    require_positive("max_scores", max_scores)
    plans: list[ChunkPlan] = []
    first_req = first_token = 0
    while first_req < len(query_lens):
        if not query_lens[first_req]:
            first_req += 1
            continue
        end, num_tokens, num_keys = first_req + 1, query_lens[first_req], key_lens[first_req]
        while end < len(query_lens) and query_lens[end]:
            more_tokens, more_keys = num_tokens + query_lens[end], num_keys + key_lens[end]
            if more_keys > max_keys or more_tokens * more_keys > max_scores:
                break
            end, num_tokens, num_keys = end + 1, more_tokens, more_keys
        step = num_tokens
        if num_tokens * num_keys > max_scores:
            step = max(max_scores // num_keys, 1)
        for cut in range(0, num_tokens, step):
            size = min(step, num_tokens - cut)
            first = first_token + cut
            plans.append(
                ChunkPlan(first_req, end - first_req, first, size, num_keys, gathers_keys=cut == 0)
            )
        first_req, first_token = end, first_token + num_tokens
    return plans


class _PrefillView:
    """The prefilling part of a batch on the device, shared by its chunks."""

    def __init__(
        self,
        common: CommonAttentionMetadata,
        split: BatchSplit,
        addressing: Addressing,
        tokens_per_state: int,
    ) -> None:
        self._first_req = split.num_decodes
        self._first_token = split.num_decode_tokens
        reqs = split.prefill_reqs
        tokens = slice(self._first_token, self._first_token + split.num_prefill_tokens)
        self._block_table = common.block_table[reqs]
        self._num_keys = (
            localise(common.seq_lens[reqs].clamp(0, addressing.max_tokens), addressing)
            // tokens_per_state
        )
        ends = common.query_start_loc[reqs.start + 1 : reqs.stop + 1]
        places = torch.arange(
            tokens.start, tokens.stop, dtype=torch.int32, device=common.positions.device
        )
        self._req_of_token = torch.searchsorted(ends, places, right=True, out_int32=True)
        # what a device says of lengths and positions must not lead out of the keys
        visible = (common.positions[tokens] + 1).clamp(0, addressing.max_tokens).to(torch.int32)
        self._visible_keys = localise(visible, addressing) // tokens_per_state

    def describe(self, plan: ChunkPlan) -> DSAPrefillChunk:
        """Return the chunk of ``plan``."""
        reqs = slice(plan.first_req, plan.first_req + plan.num_reqs)
        tokens = slice(plan.first_token, plan.first_token + plan.num_tokens)
        num_keys = self._num_keys[reqs]
        cu_seq_lens = num_keys.new_zeros(plan.num_reqs + 1)
        torch.cumsum(num_keys, 0, dtype=torch.int32, out=cu_seq_lens[1:])
        # starts on the device that disagree with the host's must not index past the chunk
        token_to_req = (self._req_of_token[tokens] - plan.first_req).clamp_(0, plan.num_reqs - 1)
        first_keys = cu_seq_lens[token_to_req]
        return DSAPrefillChunk(
            first_req=self._first_req + plan.first_req,
            num_reqs=plan.num_reqs,
            first_token=self._first_token + plan.first_token,
            num_tokens=plan.num_tokens,
            num_keys=plan.num_keys,
            gathers_keys=plan.gathers_keys,
            block_table=self._block_table[reqs],
            cu_seq_lens=cu_seq_lens,
            token_to_req=token_to_req,
            cu_seqlen_ks=first_keys,
            cu_seqlen_ke=torch.minimum(
                first_keys + self._visible_keys[tokens], cu_seq_lens[token_to_req + 1]
            ),
        )
