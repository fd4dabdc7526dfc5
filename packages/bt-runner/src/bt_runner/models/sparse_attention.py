"""Sparse attention of one layer: an indexer chooses tokens, and only those are read."""

from __future__ import annotations

import torch
from torch import Tensor

from bt_builders import DSADecodeMetadata, DSAIndexerMetadata, DSAPrefillChunk
from bt_runner.errors import RunnerError
from bt_runner.models.attention import attend
from bt_runner.models.indexer import NOTHING, IndexProjections, IndexQuery, choose, score
from bt_runner.models.mla import LatentProjections, Projected
from bt_runner.models.paging import read_line, read_rows, read_slots, slots_at, write
from bt_runner.models.step import ModelStep


class Indexer:
    """A layer's own choice of what its tokens see."""

    def __init__(self, projections: IndexProjections, cache: Tensor, group: str) -> None:
        """Take the projections, the layer's ``[blocks, size, D]`` key cache and its group."""
        self._projections = projections
        self._cache = cache
        self._group = group

    def __call__(self, hidden: Tensor, query_latent: Tensor, step: ModelStep) -> Tensor:
        """Return the positions that each token sees, ``[T, topk]``, and keep the keys."""
        config = self._projections.config
        rotation = step.rotation(config.rope)
        metadata = step.groups[self._group].of(DSAIndexerMetadata)
        keys = self._projections.keys(hidden, rotation)
        write(self._cache.flatten(0, 1), metadata.slot_mapping, keys)
        query = self._projections.queries(hidden, query_latent, rotation)
        parts = []
        if metadata.decode.num_tokens:
            parts.append(self._decode(query, metadata.decode))
        parts += [self._prefill(query, chunk) for chunk in metadata.prefill]
        return torch.cat(parts)

    def _decode(self, query: IndexQuery, part: DSADecodeMetadata) -> Tensor:
        heads, weights = query.heads[: part.num_tokens], query.weights[: part.num_tokens]
        rows = IndexQuery(
            heads.view(-1, part.query_len, *heads.shape[1:]),
            weights.view(-1, part.query_len, weights.shape[1]),
        )
        keys = read_rows(self._cache, part.block_table, part.max_seq_len)
        visible = torch.arange(keys.shape[1], device=keys.device) < part.seq_lens[..., None]
        return choose(score(rows, keys), visible, self._projections.config.topk).flatten(0, 1)

    def _prefill(self, query: IndexQuery, chunk: DSAPrefillChunk) -> Tensor:
        tokens = slice(chunk.first_token, chunk.first_token + chunk.num_tokens)
        keys = read_line(
            self._cache,
            chunk.block_table,
            chunk.cu_seq_lens,
            chunk.num_keys,
            torch.zeros_like(chunk.cu_seq_lens[1:]),
        )
        rows = IndexQuery(query.heads[None, tokens], query.weights[None, tokens])
        columns = torch.arange(len(keys), device=keys.device)
        first, end = chunk.cu_seqlen_ks[:, None], chunk.cu_seqlen_ke[:, None]
        visible = (columns >= first) & (columns < end)
        chosen = choose(score(rows, keys[None])[0], visible, self._projections.config.topk)
        return torch.where(chosen == NOTHING, NOTHING, chosen - first)


class SparseAttention:
    """MLA in which a token sees what the nearest indexer below chose for it."""

    def __init__(
        self, projections: LatentProjections, cache: Tensor, group: str, indexer: Indexer | None
    ) -> None:
        """Take the projections, the layer's cache, its group and its own indexer, if it has one."""
        self._projections = projections
        self._cache = cache
        self._group = group
        self._indexer = indexer

    def __call__(
        self, hidden: Tensor, step: ModelStep, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the attention's output ``[T, hidden]`` and the positions seen ``[T, topk]``.

        Args:
            hidden: The step's tokens, after the layer's norm.
            step: Where their requests' state lies.
            chosen: What the nearest indexer below chose.
        """
        common = step.groups[self._group].common
        projected = self._projections.project(hidden, step.rotation(self._projections.config.rope))
        write(self._cache.flatten(0, 1), common.slot_mapping, projected.row)
        if self._indexer is not None:
            chosen = self._indexer(hidden, projected.query_latent, step)
        if chosen is None:
            raise RunnerError("a sparse layer has no indexer, and none stands below it")
        slots = slots_at(
            common.block_table, step.owners[:, None], chosen, common.layout.kernel_block_size
        )
        return self._attend(projected, slots, chosen != NOTHING), chosen

    def _attend(self, projected: Projected, slots: Tensor, visible: Tensor) -> Tensor:
        config = self._projections.config
        attended = attend(
            projected.query[:, None],
            read_slots(self._cache, slots),
            visible[:, None],
            latent_dim=config.kv_lora_rank,
            scale=config.softmax_scale,
        )
        return self._projections.output(attended.values[:, 0])
