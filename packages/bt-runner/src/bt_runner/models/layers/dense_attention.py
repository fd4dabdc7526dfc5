"""Dense attention of one layer: to the cache through the table, and of a prompt to itself."""

from __future__ import annotations

import torch
from torch import Tensor

from bt_builders import MLADecodeMetadata, MLAMetadata, MLAPrefillMetadata
from bt_runner.models.cache.paging import read_line, read_rows, write
from bt_runner.models.layers.attention import PartialAttention, attend, merge
from bt_runner.models.layers.mla import LatentProjections
from bt_runner.models.sharding import Sharding
from bt_runner.models.step import ModelStep


class DenseAttention:
    """MLA in which every token sees every earlier one."""

    def __init__(
        self, projections: LatentProjections, cache: Tensor, group: str, sharding: Sharding
    ) -> None:
        """Take the projections, the layer's ``[blocks, size, row]`` cache and its group."""
        self._sharding = sharding
        self._projections = projections
        self._cache = cache
        self._group = group

    def __call__(self, hidden: Tensor, step: ModelStep) -> Tensor:
        """Return the attention's output for ``hidden`` [T, hidden], and keep its rows."""
        config = self._projections.config
        metadata = step.groups[self._group].of(MLAMetadata)
        projected = self._projections.project(hidden, step.rotation(config.rope))
        write(self._cache.flatten(0, 1), metadata.slot_mapping, projected.row)
        num_decode = metadata.decode.num_tokens
        parts = []
        if num_decode:
            req_of_token = step.req_of_token[:num_decode]
            parts.append(self._decode(projected.query[:num_decode], req_of_token, metadata.decode))
        if metadata.prefill.num_tokens:
            tokens = slice(num_decode, num_decode + metadata.prefill.num_tokens)
            req_of_token = step.req_of_token[tokens] - metadata.prefill.first_req
            query, rows = projected.query[tokens], projected.row[tokens]
            parts.append(self._prefill(query, rows, req_of_token, metadata.prefill))
        return self._projections.output(torch.cat(parts))

    def _decode(self, query: Tensor, req_of_token: Tensor, part: MLADecodeMetadata) -> Tensor:
        """Return ``[tokens, H, R]``: each token attends to its request's cache."""
        rows = read_rows(self._cache, part.block_table, part.max_seq_len)
        if part.is_uniform:
            per_request = query.view(-1, part.max_query_len, *query.shape[1:])
            lengths = part.token_seq_lens.view(-1, part.max_query_len)
        else:
            per_request, lengths = query[:, None], part.token_seq_lens[:, None]
            rows = rows[req_of_token]
        columns = torch.arange(rows.shape[1], device=rows.device)
        own = self._attend(per_request, rows, columns < lengths[..., None])
        return self._sharding.merge(own).values.flatten(0, 1)

    def _prefill(
        self, query: Tensor, rows: Tensor, req_of_token: Tensor, part: MLAPrefillMetadata
    ) -> Tensor:
        """Return ``[tokens, H, R]``: new tokens attend to each other, then to their contexts."""
        order = torch.arange(len(rows), device=rows.device)
        is_own = req_of_token[:, None] == req_of_token
        pieces = [self._attend(query[None], rows[None], (is_own & (order <= order[:, None]))[None])]
        for chunk in part.context_chunks:
            own = read_line(
                self._cache,
                part.block_table,
                chunk.local_cu_seq_lens,
                chunk.num_local_rows,
                chunk.local_starts,
            )
            context = self._sharding.ranks.gather(own).flatten(0, 1)[chunk.gathered_rows]
            visible = req_of_token[:, None] == chunk.token_to_req
            pieces.append(self._attend(query[None], context[None], visible[None]))
        return merge(pieces).values[0]

    def _attend(self, query: Tensor, rows: Tensor, visible: Tensor) -> PartialAttention:
        config = self._projections.config
        return attend(
            query, rows, visible, latent_dim=config.kv_lora_rank, scale=config.softmax_scale
        )
