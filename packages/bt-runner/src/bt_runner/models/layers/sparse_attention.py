"""Sparse attention of one layer: an indexer chooses tokens, and only those are read."""

from __future__ import annotations

import torch
from torch import Tensor

from bt_builders import DSADecodeMetadata, DSAIndexerMetadata, DSAPrefillChunk
from bt_runner.errors import RunnerError
from bt_runner.models.cache.paging import read_line, read_rows, read_slots, slots_at, write
from bt_runner.models.layers.attention import attend
from bt_runner.models.layers.indexer import NOTHING, IndexProjections, IndexQuery, choose, score
from bt_runner.models.layers.mla import LatentProjections, Projected
from bt_runner.models.sharding import Sharding
from bt_runner.models.step import ModelStep


class Indexer:
    """A layer's own choice of what its tokens see."""

    def __init__(
        self, projections: IndexProjections, cache: Tensor, group: str, sharding: Sharding
    ) -> None:
        """Take the projections, the layer's ``[blocks, size, D]`` key cache and its group."""
        self._projections = projections
        self._cache = cache
        self._group = group
        self._sharding = sharding

    def __call__(self, hidden: Tensor, query_latent: Tensor, step: ModelStep) -> Tensor:
        """Return the positions that each token sees, ``[T, topk]``, and keep the keys."""
        group = step.groups[self._group]
        metadata = group.of(DSAIndexerMetadata)
        num_positions = group.common.max_seq_len
        rotation = step.rotation(self._projections.config.rope)
        keys = self._projections.keys(hidden, rotation)
        write(self._cache.flatten(0, 1), metadata.slot_mapping, keys)
        query = self._projections.queries(hidden, query_latent, rotation)
        scores = []
        if metadata.decode.num_tokens:
            scores.append(self._score_decodes(query, metadata.decode, num_positions))
        scores += [self._score_prefills(query, part, num_positions) for part in metadata.prefill]
        return choose(torch.cat(scores), self._projections.config.topk)

    def _score_decodes(
        self, query: IndexQuery, part: DSADecodeMetadata, num_positions: int
    ) -> Tensor:
        """Return ``[tokens, positions]``, -inf where nothing is seen."""
        heads, weights = query.heads[: part.num_tokens], query.weights[: part.num_tokens]
        rows = IndexQuery(
            heads.view(-1, part.query_len, *heads.shape[1:]),
            weights.view(-1, part.query_len, weights.shape[1]),
        )
        keys = read_rows(self._cache, part.block_table, part.max_seq_len)
        visible = torch.arange(keys.shape[1], device=keys.device) < part.seq_lens[..., None]
        scores = score(rows, keys).masked_fill(~visible, -torch.inf)
        return self._sharding.in_order(scores.flatten(0, 1), num_positions)

    def _score_prefills(
        self, query: IndexQuery, chunk: DSAPrefillChunk, num_positions: int
    ) -> Tensor:
        """Return the same of tokens whose requests' keys are put into one line."""
        tokens = slice(chunk.first_token, chunk.first_token + chunk.num_tokens)
        whole_rows = torch.zeros_like(chunk.cu_seq_lens[1:])
        keys = read_line(
            self._cache, chunk.block_table, chunk.cu_seq_lens, chunk.num_keys, whole_rows
        )
        rows = IndexQuery(query.heads[None, tokens], query.weights[None, tokens])
        columns = torch.arange(len(keys), device=keys.device)
        first, end = chunk.cu_seqlen_ks[:, None], chunk.cu_seqlen_ke[:, None]
        visible = (columns >= first) & (columns < end)
        scores = score(rows, keys[None])[0].masked_fill(~visible, -torch.inf)
        return self._sharding.in_order(scores, num_positions, first)


class SparseAttention:
    """MLA in which a token sees what the nearest indexer below chose for it."""

    def __init__(
        self,
        projections: LatentProjections,
        cache: Tensor,
        group: str,
        sharding: Sharding,
        indexer: Indexer | None,
    ) -> None:
        """Take the projections, the layer's cache, its group and its own indexer, if it has one."""
        self._sharding = sharding
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
        place = self._sharding.place(chosen.clamp(min=0))
        is_own = (chosen != NOTHING) & (place.rank == self._sharding.ranks.rank)
        slots = slots_at(
            common.block_table,
            step.req_of_token[:, None],
            place.local,
            common.layout.kernel_block_size,
        )
        return self._attend(projected, slots, is_own), chosen

    def _attend(self, projected: Projected, slots: Tensor, visible: Tensor) -> Tensor:
        config = self._projections.config
        attended = attend(
            projected.query[:, None],
            read_slots(self._cache, slots),
            visible[:, None],
            latent_dim=config.kv_lora_rank,
            scale=config.softmax_scale,
        )
        return self._projections.output(self._sharding.merge(attended).values[:, 0])
