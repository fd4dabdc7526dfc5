"""The DSA indexer's metadata: lengths per token, rows per token, keys per completed state."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch

from bt_width import BlockTableLayout, BlockTableWidth, InvalidSpecError, WidthMismatchError

from ..arguments import require_layout
from ..batch.common import CommonAttentionMetadata
from ..batch.split import split_batch
from ..configured import with_options
from ..operations import DraftRows
from ..slot_builder import SlotBuilder
from .decode import DecodePart
from .metadata import DSADecodeMetadata, DSAIndexerMetadata
from .options import DSAOptions
from .prefill import PrefillPart


class DSAIndexerMetadataBuilder(SlotBuilder[DSAIndexerMetadata]):
    """Builds an indexer's metadata in buffers that are allocated once.

    It asks for the table's width because it keeps a table of its own: where a kernel
    takes one token a row, each token of a request needs a copy of the request's row.

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
        self._decode = DecodePart(
            layout, self._geometry, self._device, self._operations, self.options
        )
        self._prefill = PrefillPart(self._geometry, self.options)
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
        split = split_batch(common, self._max_decode_len)
        return DSAIndexerMetadata(
            kernel_block_size=self.layout.kernel_block_size,
            tokens_per_state=self._geometry.tokens_per_state,
            num_decodes=split.num_decodes,
            num_prefills=split.num_prefills,
            decode=self._decode.build(common, split),
            prefill=self._prefill.build(common, split),
            slot_mapping=self._state_slots(common),
        )

    def _state_slots(self, common: CommonAttentionMetadata) -> torch.Tensor:
        if self._geometry.tokens_per_state == 1:
            return common.slot_mapping
        slots = self._slots[: common.num_tokens]
        self._operations.compress_slots(
            self._geometry, common.positions, common.slot_mapping, slots
        )
        return slots

    def _describe_drafts(self, block_table: torch.Tensor, rows: DraftRows) -> DSAIndexerMetadata:
        num_reqs = rows.seq_lens.numel()
        return DSAIndexerMetadata(
            kernel_block_size=self.layout.kernel_block_size,
            tokens_per_state=self._geometry.tokens_per_state,
            num_decodes=num_reqs,
            num_prefills=0,
            decode=DSADecodeMetadata(
                form="plain",
                num_tokens=num_reqs,
                query_len=1,
                block_table=block_table,
                seq_lens=rows.local_lens.view(-1, 1),
                global_seq_lens=rows.seq_lens.view(-1, 1),
                max_seq_len=self._geometry.max_local_states(self._geometry.max_len),
            ),
            prefill=(),
            slot_mapping=rows.slot_mapping,
        )
