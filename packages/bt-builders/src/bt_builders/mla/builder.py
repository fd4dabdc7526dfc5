"""MLA's metadata: decodes through the table, prefills over contexts gathered in pieces."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch

from bt_width import BlockTableLayout, InvalidEditError, InvalidSpecError

from ..arguments import require_layout
from ..batch.common import CommonAttentionMetadata
from ..batch.split import BatchSplit, query_lens_of, split_batch
from ..configured import with_options
from ..operations import DraftRows, TokenLens
from ..slot_builder import SlotBuilder
from .context import ContextPart
from .metadata import MLADecodeMetadata, MLAMetadata, MLAPrefillMetadata
from .options import MLAOptions


class MLAMetadataBuilder(SlotBuilder[MLAMetadata]):
    """Builds MLA's metadata; decodes read the group's own table, nothing is copied.

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
        max_tokens = min(limits.max_num_batched_tokens, limits.max_num_reqs * self._max_decode_len)
        lens = torch.zeros(2, max_tokens, dtype=torch.int32, device=self._device)
        self._lens = TokenLens(lens[0], lens[1])
        self._context = ContextPart(
            layout, self._geometry, self._device, self.options.workspace_tokens
        )
        # where requests of one token begin; its first 0 is also where nothing begins
        self._draft_starts = torch.arange(
            limits.max_num_reqs + 1, dtype=torch.int32, device=self._device
        )

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
        split = split_batch(common, self._max_decode_len, uniform=self.options.uniform_decodes)
        return MLAMetadata(
            kernel_block_size=self.layout.kernel_block_size,
            slot_mapping=common.slot_mapping,
            num_decodes=split.num_decodes,
            num_prefills=split.num_prefills,
            decode=self._build_decode(common, split),
            prefill=self._build_prefill(common, split),
        )

    def _build_decode(
        self, common: CommonAttentionMetadata, split: BatchSplit
    ) -> MLADecodeMetadata:
        num_reqs, num_tokens = split.num_decodes, split.num_decode_tokens
        starts = common.query_start_loc[: num_reqs + 1]
        lens = self._leading_lens(num_tokens)
        self._operations.token_lens(self._geometry, starts, common.seq_lens[:num_reqs], lens)
        return MLADecodeMetadata(
            num_tokens=num_tokens,
            max_query_len=split.decode_query_len,
            is_uniform=split.is_uniform,
            query_start_loc=starts,
            block_table=common.block_table[:num_reqs],
            seq_lens=common.local_seq_lens[:num_reqs],
            token_seq_lens=lens.local_lens,
            max_seq_len=self._geometry.max_local_states(common.max_seq_len),
        )

    def _leading_lens(self, num_tokens: int) -> TokenLens:
        limit = self._lens.seq_lens.numel()
        if num_tokens > limit:
            raise InvalidEditError(
                f"{num_tokens} decode tokens are more than the {limit} planned for",
                num_tokens=num_tokens,
                limit=limit,
            )
        return TokenLens(*(buffer[:num_tokens] for buffer in self._lens))

    def _build_prefill(
        self, common: CommonAttentionMetadata, split: BatchSplit
    ) -> MLAPrefillMetadata:
        if not split.num_prefills:
            return self._no_prefill(common.block_table, split.num_decode_tokens)
        reqs = split.prefill_reqs
        starts = common.query_start_loc[reqs.start : reqs.stop + 1]
        query_lens = query_lens_of(common)[reqs]
        bounds = common.seq_lens_upper_bound_host.numpy()[reqs] - query_lens
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
            kernel_block_size=self.layout.kernel_block_size,
            slot_mapping=rows.slot_mapping,
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
                max_seq_len=self._geometry.max_local_states(self._geometry.max_len),
            ),
            prefill=self._no_prefill(block_table, num_reqs),
        )

    def _no_prefill(self, block_table: torch.Tensor, num_decode_tokens: int) -> MLAPrefillMetadata:
        """Return the prefilling part of a batch that only decodes."""
        num_reqs = block_table.shape[0]
        return MLAPrefillMetadata(
            first_req=num_reqs,
            num_reqs=0,
            first_token=num_decode_tokens,
            num_tokens=0,
            max_query_len=0,
            query_start_loc=self._draft_starts[:1],
            block_table=block_table[num_reqs:],
            context_lens=self._draft_starts[:0],
            context_chunks=(),
        )
