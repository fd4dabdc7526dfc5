"""Sparse attention of one layer: an indexer chooses what each token sees, and attention reads it.

Both work piece by piece, a few tokens at a time: scores are as wide as the longest context, and
what is read is as wide as the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bt_builders import DSADecodeMetadata, DSAIndexerMetadata, DSAPrefillChunk
from bt_runner.errors import RunnerError
from bt_runner.models.caches import read_line, read_rows, read_slots, slots_at, write
from bt_runner.models.config import SelectTopK
from bt_runner.models.layers.mla import LatentProjections, attend
from bt_runner.models.layers.numerics import (
    WORKSPACE_BYTES,
    Rotation,
    Scope,
    layer_norm,
    pieces,
    widened,
)
from bt_runner.models.sharding import Sharding
from bt_runner.models.step import ModelStep

NOTHING = -1
"""Stands for a position where fewer than ``topk`` tokens are visible."""


class IndexQuery(NamedTuple):
    """What a step's tokens look for.

    Attributes:
        heads: ``[T, H, D]``.
        weights: ``[T, H]``, signed.
    """

    heads: Tensor
    weights: Tensor


class IndexProjections:
    """The projections of an indexer.

    Attributes:
        config: The dimensions.
    """

    def __init__(self, config: SelectTopK, scope: Scope) -> None:
        """Take the dimensions and the indexer's weights."""
        self.config = config
        self._scope = scope

    def keys(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """Return ``[T, D]``, what the cache keeps of ``hidden`` [T, hidden]."""
        scope = self._scope
        key = scope.project(hidden, "wk")
        key = layer_norm(key, scope["k_norm.weight"], scope["k_norm.bias"], self.config.norm_eps)
        return self._rotate(key, rotation)

    def queries(self, hidden: Tensor, query_latent: Tensor, rotation: Rotation) -> IndexQuery:
        """Return what ``hidden`` [T, hidden] looks for; the latent is the attention's."""
        config = self.config
        heads = self._scope.project(query_latent, "wq_b")
        heads = self._rotate(heads.view(-1, config.num_heads, config.head_dim), rotation)
        scale = config.num_heads**-0.5 * config.head_dim**-0.5
        weights = F.linear(widened(hidden), widened(self._scope["weights_proj.weight"]))
        return IndexQuery(heads, weights * scale)

    def _rotate(self, values: Tensor, rotation: Rotation) -> Tensor:
        turning, plain = values.split_with_sizes(
            [rotation.dim, self.config.head_dim - rotation.dim], dim=-1
        )
        return torch.cat((rotation(turning), plain), dim=-1)


def score(query: IndexQuery, keys: Tensor) -> Tensor:
    """Return ``[B, M, S]``: how much each token wants each key.

    Args:
        query: Heads ``[B, M, H, D]`` and weights ``[B, M, H]``.
        keys: ``[B, S, D]``.
    """
    products = torch.einsum("bmhd,bsd->bmhs", widened(query.heads), widened(keys)).relu_()
    return torch.einsum("bmh,bmhs->bms", query.weights, products)


def choose(scores: Tensor, topk: int) -> Tensor:
    """Return ``[..., K]`` columns in rising order, ``NOTHING`` after the last one.

    K is ``topk``, or S where that is less: no more can be chosen. Of equal scores the lower
    column wins.

    Args:
        scores: ``[..., S]``; -inf where nothing may be chosen.
        topk: The most that are chosen.
    """
    num_columns = scores.shape[-1]
    chosen = scores > -torch.inf
    if topk < num_columns:
        threshold = scores.topk(topk, dim=-1).values[..., -1:]
        above = scores > threshold
        equal = scores == threshold
        room = topk - above.sum(dim=-1, keepdim=True)
        chosen &= above | (equal & (equal.cumsum(dim=-1) <= room))
    else:
        topk = num_columns
    places = (chosen.cumsum(dim=-1) - 1).masked_fill(~chosen, topk)
    columns = torch.arange(num_columns, device=scores.device).expand_as(places)
    out = places.new_full((*scores.shape[:-1], topk + 1), NOTHING)
    return out.scatter_(-1, places, columns)[..., :topk]


class _Keys(Protocol):
    """The index keys that some of a step's tokens are scored against.

    Attributes:
        first_token: The first of these tokens.
        num_tokens: How many they are.
        tokens_per_row: Tokens that are scored together.
        num_keys: The most keys that a token is scored against.
    """

    first_token: int
    num_tokens: int
    tokens_per_row: int
    num_keys: int

    def scores(self, query: IndexQuery, tokens: slice, sharding: Sharding) -> Tensor:
        """Return ``[tokens, positions]``, -inf where nothing is seen; places count from 0."""


class _DecodeKeys:
    """The keys of requests that decode, read through their rows, each row by itself."""

    first_token = 0

    def __init__(self, cache: Tensor, part: DSADecodeMetadata, num_positions: int) -> None:
        self.num_tokens = part.num_tokens
        self.tokens_per_row = part.query_len
        self.num_keys = num_positions
        self._cache = cache
        self._part = part

    def scores(self, query: IndexQuery, tokens: slice, sharding: Sharding) -> Tensor:
        part, per_row = self._part, self.tokens_per_row
        rows = slice(tokens.start // per_row, tokens.stop // per_row)
        by_row = IndexQuery(
            query.heads.view(-1, per_row, *query.heads.shape[1:]),
            query.weights.view(-1, per_row, query.weights.shape[1]),
        )
        keys = read_rows(self._cache, part.block_table[rows], part.max_seq_len)
        columns = torch.arange(keys.shape[1], device=keys.device)
        visible = columns < part.seq_lens[rows, :, None]
        scores = score(by_row, keys).masked_fill_(~visible, -torch.inf)
        return sharding.in_order(scores.flatten(0, 1), self.num_keys)


class _PrefillKeys:
    """The keys of requests that prefill, put into one line."""

    tokens_per_row = 1

    def __init__(self, line: Tensor, chunk: DSAPrefillChunk, num_positions: int) -> None:
        self.first_token = chunk.first_token
        self.num_tokens = chunk.num_tokens
        self.num_keys = max(len(line), num_positions)
        self._line = line
        self._chunk = chunk
        self._num_positions = num_positions

    def scores(self, query: IndexQuery, tokens: slice, sharding: Sharding) -> Tensor:
        rows = IndexQuery(query.heads[None], query.weights[None])
        columns = torch.arange(len(self._line), device=self._line.device)
        first = self._chunk.cu_seqlen_ks[tokens, None]
        visible = (columns >= first) & (columns < self._chunk.cu_seqlen_ke[tokens, None])
        scores = score(rows, self._line[None])[0].masked_fill_(~visible, -torch.inf)
        return sharding.in_order(scores, self._num_positions, first)


class Indexer:
    """A layer's own choice of what its tokens see.

    Attributes:
        projections: Its projections.
    """

    def __init__(self, projections: IndexProjections, cache: Tensor, group: str) -> None:
        """Take the projections, the layer's ``[blocks, size, D]`` key cache and its group."""
        self.projections = projections
        self._cache = cache
        self._group = group

    def keep(self, hidden: Tensor, step: ModelStep) -> None:
        """Write the keys of a step's tokens."""
        metadata = step.groups[self._group].of(DSAIndexerMetadata)
        rotation = step.rotation(self.projections.config.rope)
        keys = self.projections.keys(hidden, rotation)
        write(self._cache.flatten(0, 1), metadata.slot_mapping, keys)

    def keys(self, step: ModelStep) -> Iterator[_Keys]:
        """Give the keys that a step's tokens are scored against, in the tokens' order."""
        group = step.groups[self._group]
        metadata, num_positions = group.of(DSAIndexerMetadata), group.common.max_seq_len
        if metadata.decode.num_tokens:
            yield _DecodeKeys(self._cache, metadata.decode, num_positions)
        line = None
        for chunk in metadata.prefill:
            if line is None or chunk.gathers_keys:
                whole_rows = torch.zeros_like(chunk.cu_seq_lens[1:])
                line = read_line(
                    self._cache, chunk.block_table, chunk.cu_seq_lens, chunk.num_keys, whole_rows
                )
            yield _PrefillKeys(line, chunk, num_positions)


class _Piece(NamedTuple):
    """Some of a step's tokens that are computed together.

    Attributes:
        tokens: Which.
        keys: What an indexer scores them against; None where the choice is made.
        within: The tokens, counted from the first that these keys are for.
    """

    tokens: slice
    keys: _Keys | None
    within: slice


class SparseAttention:
    """MLA in which a token sees what the nearest indexer below chose for it."""

    def __init__(
        self,
        projections: LatentProjections,
        cache: Tensor,
        group: str,
        sharding: Sharding,
        indexer: Indexer | None,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """Take the projections, the layer's cache, its group and its own indexer, if it has one."""
        self._sharding = sharding
        self._projections = projections
        self._cache = cache
        self._group = group
        self._indexer = indexer
        self._workspace_bytes = workspace_bytes

    def __call__(
        self, hidden: Tensor, step: ModelStep, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the attention's output ``[T, hidden]`` and the positions seen ``[T, K]``.

        K is the indexer's ``topk``, or the longest context of the step where that is shorter.

        Args:
            hidden: The step's tokens, after the layer's norm.
            step: Where their requests' state lies.
            chosen: What the nearest indexer below chose.
        """
        if self._indexer is None and chosen is None:
            raise RunnerError("a sparse layer has no indexer, and none stands below it")
        common = step.groups[self._group].common
        rotation = step.rotation(self._projections.config.rope)
        rows = self._projections.rows(hidden, rotation)
        write(self._cache.flatten(0, 1), common.slot_mapping, rows)
        if self._indexer is not None:
            self._indexer.keep(hidden, step)
        # written piece by piece: a list of pieces and its copy would take twice as much
        attended, choices = torch.empty_like(hidden), None
        for piece in self._pieces(step, len(hidden), chosen):
            projected = self._projections.queries(hidden[piece.tokens], rotation.at(piece.tokens))
            if self._indexer is not None and piece.keys is not None:
                own = self._indexer.projections
                own_rotation = step.rotation(own.config.rope).at(piece.tokens)
                query = own.queries(hidden[piece.tokens], projected.latent, own_rotation)
                scores = piece.keys.scores(query, piece.within, self._sharding)
                seen = choose(scores, own.config.topk)
                if choices is None:
                    choices = seen.new_empty(len(hidden), seen.shape[1])
                choices[piece.tokens] = seen
            elif chosen is not None:
                seen = chosen[piece.tokens]
            attended[piece.tokens] = self._attend(projected.heads, seen, piece.tokens, step)
        if choices is not None:
            chosen = choices
        if chosen is None:
            chosen = hidden.new_empty(0, 0, dtype=torch.int64)
        return attended, chosen

    def _pieces(self, step: ModelStep, num_tokens: int, chosen: Tensor | None) -> Iterator[_Piece]:
        if self._indexer is None:
            width = chosen.shape[1] if chosen is not None else 0
            for tokens in pieces(num_tokens, self._bytes_of(width), self._workspace_bytes):
                yield _Piece(tokens, None, tokens)
            return
        config = self._indexer.projections.config
        # products and scores of each key, and about six numbers of 8 bytes that a choice takes
        bytes_per_key = config.num_heads * step.wide_bytes + 48
        for keys in self._indexer.keys(step):
            bytes_per_token = keys.num_keys * bytes_per_key + self._bytes_of(
                min(config.topk, keys.num_keys)
            )
            if isinstance(keys, _DecodeKeys):
                bytes_per_token += keys.num_keys * config.head_dim * step.wide_bytes
            per_row = keys.tokens_per_row
            spans = pieces(
                keys.num_tokens // per_row, bytes_per_token * per_row, self._workspace_bytes
            )
            for rows in spans:
                within = slice(rows.start * per_row, rows.stop * per_row)
                first = keys.first_token
                yield _Piece(slice(first + within.start, first + within.stop), keys, within)

    def _bytes_of(self, num_seen: int) -> int:
        """Return the bytes that attention to so many rows takes for a token."""
        config = self._projections.config
        row = config.kv_lora_rank + config.rope.dim
        size = max(self._cache.element_size(), 4)
        # the rows as read, masked and widened; scores and shares; queries and values
        return size * (3 * num_seen * row + config.num_heads * (3 * num_seen + 3 * row))

    def _attend(self, query: Tensor, chosen: Tensor, tokens: slice, step: ModelStep) -> Tensor:
        """Return ``[tokens, hidden]``."""
        common = step.groups[self._group].common
        place = self._sharding.place(chosen.clamp(min=0))
        visible = (chosen != NOTHING) & (place.rank == self._sharding.ranks.rank)
        slots = slots_at(
            common.block_table,
            step.req_of_token[tokens, None],
            place.local,
            common.layout.kernel_block_size,
        )
        attended = attend(
            query[:, None],
            read_slots(self._cache, slots),
            visible[:, None],
            latent_dim=self._projections.config.kv_lora_rank,
            scale=self._projections.scale,
        )
        return self._projections.output(self._sharding.merge(attended).values[:, 0])
