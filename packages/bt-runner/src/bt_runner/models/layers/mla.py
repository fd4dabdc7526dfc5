"""Multi-head latent attention in absorbed form: queries go to the latents, values come back.

What dense and sparse layers share, and the dense layer itself: attention to the cache through the
table, and of a prompt to itself.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import torch
from torch import Tensor

from bt_builders import MLADecodeMetadata, MLAMetadata, MLAPrefillMetadata
from bt_runner.models.caches import read_line, read_rows, write
from bt_runner.models.config import MLA
from bt_runner.models.layers.numerics import (
    WORKSPACE_BYTES,
    Rotation,
    Scope,
    pieces,
    rms_norm,
    widened,
)
from bt_runner.models.sharding import PartialAttention, Sharding, merge
from bt_runner.models.step import ModelStep


class Queries(NamedTuple):
    """What a step's tokens look for.

    Attributes:
        latent: ``[T, q_lora_rank]``, which the indexer reads too; the hidden states where queries
            have no latent.
        heads: ``[T, H, kv_lora_rank + rope]``, absorbed.
    """

    latent: Tensor
    heads: Tensor


class LatentProjections:
    """The projections around attention to cached latents.

    Attributes:
        config: The dimensions.
        scale: What the products of queries and rows are multiplied by.
    """

    def __init__(self, config: MLA, scope: Scope) -> None:
        """Take the dimensions and the attention's weights."""
        self.config = config
        self.scale = config.softmax_scale
        self._scope = scope
        self._query_shape = (-1, config.num_heads, config.qk_dim)
        up = scope["kv_b_proj.weight"].view(config.num_heads, -1, config.kv_lora_rank)
        self._up_key, self._up_value = up.split_with_sizes([config.nope_dim, config.v_dim], dim=1)

    def rows(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """Return ``[T, kv_lora_rank + rope]``, what the cache keeps of ``hidden`` [T, hidden]."""
        config = self.config
        kept, key = self._scope.project(hidden, "kv_a_proj_with_mqa").split_with_sizes(
            [config.kv_lora_rank, config.rope.dim], dim=-1
        )
        kept = rms_norm(kept, self._scope["kv_a_layernorm.weight"], config.latent_norm_eps)
        return torch.cat((kept, rotation(key)), dim=-1)

    def queries(self, hidden: Tensor, rotation: Rotation) -> Queries:
        """Return the queries of ``hidden`` [T, hidden], after the layer's norm."""
        config = self.config
        latent, name = hidden, "q_proj"
        if config.q_lora_rank is not None:
            latent, name = self._scope.project(hidden, "q_a_proj"), "q_b_proj"
            latent = rms_norm(latent, self._scope["q_a_layernorm.weight"], config.latent_norm_eps)
        heads = self._scope.project(latent, name).view(self._query_shape)
        plain, turning = heads.split_with_sizes([config.nope_dim, config.rope.dim], dim=-1)
        absorbed = torch.einsum("thn,hnr->thr", plain, self._up_key)
        return Queries(latent, torch.cat((absorbed, rotation(turning)), dim=-1))

    def output(self, values: Tensor) -> Tensor:
        """Return ``[T, hidden]`` for attended latents ``[T, H, kv_lora_rank]``."""
        heads = torch.einsum("thr,hvr->thv", values, widened(self._up_value))
        return self._scope.project(heads.flatten(1), "o_proj")


def attend(
    query: Tensor, rows: Tensor, visible: Tensor, *, latent_dim: int, scale: float
) -> PartialAttention:
    """Attend to cached rows, whose first ``latent_dim`` numbers are also the values.

    Args:
        query: ``[B, Q, H, D]``, absorbed: in the space of the rows.
        rows: ``[B, S, D]``; what is not visible may hold anything, NaN included.
        visible: ``[B, Q, S]``, bool.
        latent_dim: Numbers of a row that are its value.
        scale: Factor of the products.
    """
    seen = visible.any(dim=1)[:, :, None]
    rows = widened(rows.masked_fill(~seen, 0))
    scores = torch.einsum("bqhd,bsd->bqhs", widened(query), rows) * scale
    scores = scores.masked_fill(~visible[:, :, None, :], -torch.inf)
    log_weight = scores.logsumexp(dim=-1)
    # with nothing to see, exp(-inf - 0) is the wanted 0, and exp(-inf + inf) would be NaN
    anchor = log_weight.masked_fill(log_weight == -torch.inf, 0)
    shares = torch.exp(scores - anchor[..., None])
    values = torch.einsum("bqhs,bsr->bqhr", shares, rows[..., :latent_dim])
    return PartialAttention(values, log_weight)


_LONGEST_PIECE = 256
"""Tokens of a prompt that attend together: what lies behind the last of them is not multiplied."""


class DenseAttention:
    """MLA in which every token sees every earlier one."""

    def __init__(
        self,
        projections: LatentProjections,
        cache: Tensor,
        group: str,
        sharding: Sharding,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """Take the projections, the layer's ``[blocks, size, row]`` cache and its group."""
        self._sharding = sharding
        self._projections = projections
        self._cache = cache
        self._group = group
        self._workspace_bytes = workspace_bytes

    def __call__(self, hidden: Tensor, step: ModelStep) -> Tensor:
        """Return the attention's output for ``hidden`` [T, hidden], and keep its rows."""
        metadata = step.groups[self._group].of(MLAMetadata)
        rotation = step.rotation(self._projections.config.rope)
        rows = self._projections.rows(hidden, rotation)
        write(self._cache.flatten(0, 1), metadata.slot_mapping, rows)
        # written piece by piece: a list of pieces and its copy would take twice as much
        output = torch.empty_like(hidden)
        if metadata.decode.num_tokens:
            self._decode(hidden, rotation, step, metadata.decode, output)
        if metadata.prefill.num_tokens:
            self._prefill(hidden, rows, rotation, step, metadata.prefill, output)
        return output

    def _decode(
        self,
        hidden: Tensor,
        rotation: Rotation,
        step: ModelStep,
        part: MLADecodeMetadata,
        output: Tensor,
    ) -> None:
        """Write the outputs of tokens that each attend to their request's cache."""
        per_row = part.max_query_len if part.is_uniform else 1
        num_seen = part.max_seq_len
        bytes_per_row = num_seen * self._bytes_of_row() + per_row * self._bytes_of(num_seen)
        for span in pieces(part.num_tokens // per_row, bytes_per_row, self._workspace_bytes):
            tokens = slice(span.start * per_row, span.stop * per_row)
            query = self._projections.queries(hidden[tokens], rotation.at(tokens)).heads
            # where queries are of different lengths, each token reads its request's row
            table = part.block_table[span if part.is_uniform else step.req_of_token[tokens]]
            rows = read_rows(self._cache, table, num_seen)
            lengths = part.token_seq_lens[tokens].view(-1, per_row, 1)
            columns = torch.arange(rows.shape[1], device=rows.device)
            own = self._attend(query.view(-1, per_row, *query.shape[1:]), rows, columns < lengths)
            values = self._sharding.merge(own).values.flatten(0, 1)
            output[tokens] = self._projections.output(values)

    def _prefill(
        self,
        hidden: Tensor,
        rows: Tensor,
        rotation: Rotation,
        step: ModelStep,
        part: MLAPrefillMetadata,
        output: Tensor,
    ) -> None:
        """Write the outputs of new tokens that attend to each other, then to their contexts."""
        common = step.groups[self._group].common
        whole = slice(part.first_token, part.first_token + part.num_tokens)
        rows, req_of_token = rows[whole], step.req_of_token[whole] - part.first_req
        order = torch.arange(part.num_tokens, device=rows.device)
        reqs = slice(part.first_req, part.first_req + part.num_reqs)
        starts = (common.query_start_loc_host[reqs] - part.first_token).tolist()
        most = max([chunk.num_tokens for chunk in part.context_chunks], default=0)
        bytes_per_token = self._bytes_of(max(most, min(part.num_tokens, part.max_query_len)))
        workspace = min(self._workspace_bytes, _LONGEST_PIECE * bytes_per_token)
        for piece in pieces(part.num_tokens, bytes_per_token, workspace):
            tokens = slice(part.first_token + piece.start, part.first_token + piece.stop)
            query = self._projections.queries(hidden[tokens], rotation.at(tokens)).heads[None]
            # keys from the piece's first request on: nothing before or behind them is seen
            keys = slice(starts[bisect_right(starts, piece.start) - 1], piece.stop)
            is_own = req_of_token[piece, None] == req_of_token[keys]
            is_past = order[keys] <= order[piece, None]
            parts = [self._attend(query, rows[None, keys], (is_own & is_past)[None])]
            for index in range(len(part.context_chunks)):
                context = self._context(part, index)
                visible = req_of_token[piece, None] == part.context_chunks[index].token_to_req
                parts.append(self._attend(query, context[None], visible[None]))
            output[tokens] = self._projections.output(merge(parts).values[0])

    def _context(self, part: MLAPrefillMetadata, index: int) -> Tensor:
        """Return the rows of a chunk of contexts, from all ranks."""
        chunk = part.context_chunks[index]
        own = read_line(
            self._cache,
            part.block_table,
            chunk.local_cu_seq_lens,
            chunk.num_local_rows,
            chunk.local_starts,
        )
        return self._sharding.ranks.gather(own).flatten(0, 1)[chunk.gathered_rows]

    def _attend(self, query: Tensor, rows: Tensor, visible: Tensor) -> PartialAttention:
        projections = self._projections
        latent_dim = projections.config.kv_lora_rank
        return attend(query, rows, visible, latent_dim=latent_dim, scale=projections.scale)

    def _bytes_of_row(self) -> int:
        """Return the bytes of a row as read, masked and widened."""
        config = self._projections.config
        return 3 * (config.kv_lora_rank + config.rope.dim) * max(self._cache.element_size(), 4)

    def _bytes_of(self, num_seen: int) -> int:
        """Return the bytes that a token's scores, shares, queries and values take."""
        config = self._projections.config
        row = config.kv_lora_rank + config.rope.dim
        size = max(self._cache.element_size(), 4)
        return size * config.num_heads * (3 * num_seen + 3 * row)
