"""Multi-head latent attention with every key and value written out, never absorbed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from bt_runner.dense.numerics import rms_norm, rotate, widen
from bt_runner.dense.selection import ROWS_AT_ONCE, Choice, choose, index_keys
from bt_runner.models.config import (
    MLA,
    AttentionLayer,
    SelectAll,
    SelectShared,
    SelectTopK,
)
from bt_runner.models.layers.numerics import Scope


@dataclass(slots=True)
class AttentionCache:
    """What one layer keeps of the tokens seen so far.

    Attributes:
        latent: ``[S, kv_lora_rank]``, after its norm.
        rope_key: ``[S, rope.dim]``, turned.
        index_key: ``[S, index head_dim]``, normed and turned; no columns without an indexer.
    """

    latent: Tensor
    rope_key: Tensor
    index_key: Tensor


def empty_attention_cache(
    layer: AttentionLayer, dtype: torch.dtype, device: torch.device
) -> AttentionCache:
    """Return the cache of a request that has no tokens yet."""
    index_dim = layer.selection.head_dim if isinstance(layer.selection, SelectTopK) else 0

    def empty(columns: int) -> Tensor:
        return torch.empty(0, columns, dtype=dtype, device=device)

    return AttentionCache(
        empty(layer.mla.kv_lora_rank), empty(layer.mla.rope.dim), empty(index_dim)
    )


def attend(
    x: Tensor,
    positions: Tensor,
    layer: AttentionLayer,
    scope: Scope,
    cache: AttentionCache,
    shared: Choice | None,
) -> tuple[Tensor, Choice | None]:
    """Return the attention's output ``[T, hidden]`` and what the layer's tokens see, if sparse.

    Args:
        x: ``[T, hidden]``, the normed input.
        positions: ``[T]``, following on what the cache holds.
        layer: The layer's dimensions.
        scope: The weights of this attention.
        cache: Extended in place by the ``T`` tokens.
        shared: What the nearest indexer below chose.
    """
    mla = layer.mla
    query_latent, query_name = x, "q_proj"
    if mla.q_lora_rank is not None:
        query_name = "q_b_proj"
        query_latent = rms_norm(
            scope.project(x, "q_a_proj"), scope["q_a_layernorm.weight"], mla.latent_norm_eps
        )
    _remember(x, positions, layer, scope, cache)
    choice: Choice | None
    match layer.selection:
        case SelectAll():
            choice = None
        case SelectShared():
            choice = shared
        case SelectTopK() as indexer:
            choice = choose(
                x,
                query_latent,
                positions,
                cache.index_key,
                indexer,
                scope.within("indexer"),
            )
        case _:
            assert_never(layer.selection)
    visible = torch.arange(len(cache.latent), device=x.device) <= positions[:, None]
    if choice is not None:
        visible &= choice.chosen
    queries = scope.project(query_latent, query_name)
    heads = _attention(queries, positions, visible, mla, scope["kv_b_proj.weight"], cache)
    return scope.project(heads, "o_proj"), choice


def _remember(
    x: Tensor,
    positions: Tensor,
    layer: AttentionLayer,
    scope: Scope,
    cache: AttentionCache,
) -> None:
    mla = layer.mla
    latent, rope_key = scope.project(x, "kv_a_proj_with_mqa").split_with_sizes(
        [mla.kv_lora_rank, mla.rope.dim], dim=-1
    )
    latent = rms_norm(latent, scope["kv_a_layernorm.weight"], mla.latent_norm_eps)
    cache.latent = torch.cat([cache.latent, latent])
    cache.rope_key = torch.cat([cache.rope_key, rotate(rope_key, positions, mla.rope)])
    if isinstance(layer.selection, SelectTopK):
        key = index_keys(x, positions, layer.selection, scope.within("indexer"))
        cache.index_key = torch.cat([cache.index_key, key])


def _attention(
    queries: Tensor,
    positions: Tensor,
    visible: Tensor,
    mla: MLA,
    up_projection: Tensor,
    cache: AttentionCache,
) -> Tensor:
    """Return the heads' outputs ``[T, num_heads * v_dim]``."""
    queries = queries.view(len(positions), mla.num_heads, mla.qk_dim)
    still, turning = queries.split_with_sizes([mla.nope_dim, mla.rope.dim], dim=-1)
    query = torch.cat([still, rotate(turning, positions, mla.rope)], dim=-1).transpose(0, 1)
    num_seen = len(cache.latent)
    keys_values = (cache.latent @ up_projection.T).view(num_seen, mla.num_heads, -1)
    still_key, value = keys_values.split_with_sizes([mla.nope_dim, mla.v_dim], dim=-1)
    rope_key = cache.rope_key[:, None].expand(num_seen, mla.num_heads, mla.rope.dim)
    key = torch.cat([still_key, rope_key], dim=-1).permute(1, 2, 0)
    value = value.transpose(0, 1)
    outputs = []
    for rows in range(0, len(positions), ROWS_AT_ONCE):
        some = slice(rows, rows + ROWS_AT_ONCE)
        scores = (query[:, some] @ key).mul_(mla.softmax_scale)
        scores = widen(scores).masked_fill_(~visible[some], float("-inf"))
        outputs.append(torch.softmax(scores, dim=-1).to(value.dtype) @ value)
    return torch.cat(outputs, dim=1).transpose(0, 1).reshape(len(positions), -1)
