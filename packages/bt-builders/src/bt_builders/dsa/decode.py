"""The indexer's decodes: one length per token, and a table whose rows are those of its lengths."""

from __future__ import annotations

import torch

from bt_width import BlockTableLayout, InvalidEditError, index_buffer_bytes, row_bytes

from ..batch.common import CommonAttentionMetadata
from ..batch.geometry import RowGeometry
from ..batch.split import BatchSplit
from ..operations import ExpandedRows, Operations, TokenLens
from .metadata import DSADecodeMetadata
from .options import DSAOptions


class DecodePart:
    """Builds the decoding part in buffers of its own, one row per decode token at most."""

    def __init__(
        self,
        layout: BlockTableLayout,
        geometry: RowGeometry,
        device: torch.device,
        operations: Operations,
        options: DSAOptions,
    ) -> None:
        """Allocate for the most decode tokens that a step may hold."""
        self._geometry = geometry
        self._operations = operations
        self._native_query_lens = options.native_query_lens | {1}
        self._max_rows = index_buffer_bytes(layout) // row_bytes(layout)
        ints = torch.zeros(3, self._max_rows, dtype=torch.int32, device=device)
        self._lens = TokenLens(ints[0], ints[1])
        self._rows = ExpandedRows(
            torch.zeros(self._max_rows, geometry.width, dtype=torch.int32, device=device),
            ints[2],
        )

    def build(self, common: CommonAttentionMetadata, split: BatchSplit) -> DSADecodeMetadata:
        """Write the lengths of the decode tokens, and their rows where they need their own.

        Raises:
            InvalidEditError: There are more decode tokens than a step may hold.
        """
        num_tokens = split.num_decode_tokens
        if num_tokens > self._max_rows:
            raise InvalidEditError(
                f"{num_tokens} decode tokens are more than the {self._max_rows} rows planned for",
                num_tokens=num_tokens,
                max_rows=self._max_rows,
            )
        is_native = split.is_uniform and split.decode_query_len in self._native_query_lens
        lens = TokenLens(self._lens.seq_lens[:num_tokens], self._lens.local_lens[:num_tokens])
        num_reqs = split.num_decodes
        starts = common.query_start_loc[: num_reqs + 1]
        seq_lens = common.seq_lens[:num_reqs]
        table = common.block_table[:num_reqs]
        if is_native:
            self._operations.token_lens(self._geometry, starts, seq_lens, lens)
        else:
            rows = ExpandedRows(self._rows.table[:num_tokens], self._rows.num_live[:num_tokens])
            self._operations.expand_rows(self._geometry, starts, seq_lens, table, lens, rows)
            table = rows.table
        query_len = split.decode_query_len if is_native else 1
        return DSADecodeMetadata(
            form=("plain" if query_len == 1 else "native") if is_native else "flattened",
            num_tokens=num_tokens,
            query_len=query_len,
            block_table=table,
            seq_lens=lens.local_lens.view(-1, query_len),
            global_seq_lens=lens.seq_lens.view(-1, query_len),
            max_seq_len=self._geometry.max_local_states(common.max_seq_len),
        )
