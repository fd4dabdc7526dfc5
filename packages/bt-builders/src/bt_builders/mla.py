"""Builds MLA's metadata: decodes through the table, prefills over contexts gathered in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch

from bt_width import BlockTableLayout, InvalidSpecError

from ._checks import require_layout, require_positive
from ._support import LeadingParts, kept, with_options
from .common import CommonAttentionMetadata, most_local_states, query_lens_of
from .contexts import ContextPart, MLAContextChunk
from .drafts import SlotBuilder
from .operations import DraftRows, TokenLens
from .split import BatchSplit, split_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAOptions:
    """The choices of one MLA backend.

    Attributes:
        max_decode_query_len: The most tokens of a request that decodes, or None for one
            and the drafts that the limits allow.
        uniform_decodes: Whether the kernel needs equal query lengths; rows after the
            first that differs then prefill.
        workspace_tokens: Tokens of context that a prefill gathers at once.
    """

    max_decode_query_len: int | None = None
    uniform_decodes: bool = False
    workspace_tokens: int = 65_536

    def __post_init__(self) -> None:
        """Refuse sizes that hold nothing."""
        require_positive("workspace_tokens", self.workspace_tokens)
        if self.max_decode_query_len is not None:
            require_positive("max_decode_query_len", self.max_decode_query_len)
        if not isinstance(self.uniform_decodes, bool):
            raise InvalidSpecError(
                f"uniform_decodes must be a bool, not {self.uniform_decodes!r}",
                value=self.uniform_decodes,
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLADecodeMetadata:
    """The decoding part: requests (D) that attend to the cache through their rows.

    Attributes:
        num_tokens: Tokens (Q), padding included.
        max_query_len: The most tokens of one request.
        is_uniform: Whether every row has that many.
        query_start_loc: [D + 1] int32.
        block_table: [D, W] int32.
        seq_lens: [D] int32; tokens on this rank.
        token_seq_lens: [Q] int32; what each token sees on this rank, itself included.
        max_seq_len: An upper bound of both, equal on all ranks.
    """

    num_tokens: int
    max_query_len: int
    is_uniform: bool
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    token_seq_lens: torch.Tensor
    max_seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAPrefillMetadata:
    """The prefilling part: requests (P) whose new tokens attend to each other and a context.

    Attributes:
        first_req: The first request's row in the batch.
        num_reqs: Requests.
        first_token: The first token's place in the batch.
        num_tokens: New tokens.
        max_query_len: The most new tokens of one request.
        query_start_loc: [P + 1] int32; counted from ``first_token``.
        block_table: [P, W] int32.
        context_lens: [P] int32; tokens of each request before this step.
        context_chunks: The contexts in pieces; none where no request has one.
    """

    first_req: int
    num_reqs: int
    first_token: int
    num_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    context_chunks: tuple[MLAContextChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAMetadata:
    """One step of MLA: decodes first, then prefills; a part may be empty.

    Attributes:
        kernel_block_size: Tokens of a column.
        slot_mapping: [T] int64.
        positions: [T] int64; each token's place in its request, counted over all ranks;
            below 0 for a padding row of draft steps.
        num_decodes: Requests that decode, padding included.
        num_prefills: Requests that prefill.
        decode: The decoding part.
        prefill: The prefilling part.
    """

    kernel_block_size: int
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    num_decodes: int
    num_prefills: int
    decode: MLADecodeMetadata
    prefill: MLAPrefillMetadata


class MLAMetadataBuilder(SlotBuilder[MLAMetadata]):
    """Builds MLA's metadata; decodes read the group's own table, nothing is copied.

    Belongs to one thread at a time; those of other groups and micro-batches run beside it.

    Attributes:
        options: What the backend's kernels take; see ``configured``.
    """

    requires_block_table_width: ClassVar[Literal[False]] = False
    cudagraph_support: ClassVar[Literal["uniform"]] = "uniform"
    options: ClassVar[MLAOptions] = MLAOptions()

    def __init__(self, layout: BlockTableLayout, device: torch.device | str) -> None:
        """Allocate for the largest step that ``layout`` allows.

        Raises:
            InvalidSpecError: The group has no token's slot, or the workspace is too small.
        """
        require_layout(layout)
        if layout.slot_mode != "block":
            raise InvalidSpecError(
                f"MLA needs every token's latent; a {layout.kind} group keeps none for long",
                layout=layout,
            )
        super().__init__(layout, device)
        limits = layout.limits
        self._max_decode_len = self.options.max_decode_query_len or (
            1 + limits.num_speculative_tokens
        )
        self._max_tokens = min(
            limits.max_num_batched_tokens, limits.max_num_reqs * self._max_decode_len
        )
        lens = torch.zeros(2, self._max_tokens, dtype=torch.int32, device=self._device)
        self._lens = LeadingParts(TokenLens(lens[0], lens[1]))
        self._context = ContextPart(layout, self._device, self.options.workspace_tokens)
        # where requests of one token begin; its first 0 is also where nothing begins
        self._draft_starts = torch.zeros(
            limits.max_num_reqs + 1, dtype=torch.int32, device=self._device
        )
        starts = self._draft_starts
        no_rows = torch.zeros(0, layout.width, dtype=torch.int32, device=self._device)
        self._no_prefill = kept(_no_prefill, starts[:1], starts[:0], no_rows)
        self._write_constants()

    @classmethod
    def configured(cls, options: MLAOptions) -> type[Self]:
        """Return this builder's class with other ``options``.

        Raises:
            InvalidSpecError: They are no ``MLAOptions``.
        """
        return with_options(cls, options, MLAOptions)

    def build(self, common: CommonAttentionMetadata) -> MLAMetadata:
        """Return the metadata of one step; valid until the next one is built.

        Raises:
            WidthMismatchError: A tensor of ``common`` is not as planned; nothing changed.
            InvalidEditError: The batch is larger than planned; nothing changed.
            RowOverflowError: A request is longer than a row was planned for; nothing changed.
        """
        self._guard.check(common)
        split = split_batch(
            common, self._max_decode_len, uniform=self.options.uniform_decodes
        ).bounded(self._max_tokens)
        return MLAMetadata(
            kernel_block_size=self._addressing.kernel_block_size,
            slot_mapping=common.slot_mapping,
            positions=common.positions,
            num_decodes=split.num_decodes,
            num_prefills=split.num_prefills,
            decode=self._build_decode(common, split),
            prefill=self._build_prefill(common, split),
        )

    def rebind(self) -> None:
        """Write the builder's constants and buffers anew, in place, after memory was lost."""
        super().rebind()
        self._lens.fill(0)
        self._write_constants()

    def _write_constants(self) -> None:
        starts = self._draft_starts
        torch.arange(starts.numel(), dtype=torch.int32, device=self._device, out=starts)

    def _build_decode(
        self, common: CommonAttentionMetadata, split: BatchSplit
    ) -> MLADecodeMetadata:
        num_reqs, num_tokens = split.num_decodes, split.num_decode_tokens
        starts, seq_lens, table = common.query_start_loc, common.seq_lens, common.block_table
        local_seq_lens = common.local_seq_lens
        if num_reqs < common.num_reqs:
            starts, seq_lens, table = starts[: num_reqs + 1], seq_lens[:num_reqs], table[:num_reqs]
            local_seq_lens = local_seq_lens[:num_reqs]
        lens = self._lens.first(num_tokens)
        self._operations.token_lens(
            self._addressing, self._tokens_per_state, starts, seq_lens, lens
        )
        return MLADecodeMetadata(
            num_tokens=num_tokens,
            max_query_len=split.decode_query_len,
            is_uniform=split.is_uniform,
            query_start_loc=starts,
            block_table=table,
            seq_lens=local_seq_lens,
            token_seq_lens=lens.local_lens,
            max_seq_len=most_local_states(self._addressing, 1, common.max_seq_len),
        )

    def _build_prefill(
        self, common: CommonAttentionMetadata, split: BatchSplit
    ) -> MLAPrefillMetadata:
        if not split.num_prefills:
            return self._no_prefill(split.num_decodes, split.num_decode_tokens)
        reqs = split.prefill_reqs
        starts = common.query_start_loc[reqs.start : reqs.stop + 1]
        query_lens = query_lens_of(common).of_rows[reqs]
        bounds = common.seq_lens_upper_bound_host.numpy()[reqs] - query_lens
        bounds[query_lens == 0] = 0  # no query reads that context
        context_lens = common.num_computed_tokens[reqs]
        return MLAPrefillMetadata(
            first_req=reqs.start,
            num_reqs=split.num_prefills,
            first_token=split.num_decode_tokens,
            num_tokens=split.num_prefill_tokens,
            max_query_len=int(query_lens.max(initial=0)),
            query_start_loc=starts - split.num_decode_tokens,
            block_table=common.block_table[reqs],
            context_lens=context_lens,
            context_chunks=self._context.build(bounds.tolist(), context_lens),
        )

    def _describe_drafts(self, block_table: torch.Tensor, rows: DraftRows) -> MLAMetadata:
        num_reqs = rows.seq_lens.numel()
        starts = self._draft_starts[: num_reqs + 1]
        return MLAMetadata(
            kernel_block_size=self._addressing.kernel_block_size,
            slot_mapping=rows.slot_mapping,
            positions=rows.positions,
            num_decodes=num_reqs,
            num_prefills=0,
            decode=MLADecodeMetadata(
                num_tokens=num_reqs,
                max_query_len=1,
                is_uniform=True,
                query_start_loc=starts,
                block_table=block_table,
                seq_lens=rows.local_lens,
                token_seq_lens=rows.local_lens,
                max_seq_len=most_local_states(self._addressing, 1, self._addressing.max_tokens),
            ),
            prefill=self._no_prefill(num_reqs, num_reqs),
        )


def _no_prefill(
    one_start: torch.Tensor,
    no_lens: torch.Tensor,
    no_rows: torch.Tensor,
    num_reqs: int,
    num_decode_tokens: int,
) -> MLAPrefillMetadata:
    """Return the prefilling part of a batch that only decodes."""
    return MLAPrefillMetadata(
        first_req=num_reqs,
        num_reqs=0,
        first_token=num_decode_tokens,
        num_tokens=0,
        max_query_len=0,
        query_start_loc=one_start,
        block_table=no_rows,
        context_lens=no_lens,
        context_chunks=(),
    )
