"""Attention layers: their heads, latents and windows, read from the keys that families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from ..errors import UnknownModelError
from .caches import IndexCache, KeyValueCache, LatentCache
from .fields import MAX_LAYERS, Fields

Kind: TypeAlias = Literal["full", "window", "chunk", "indexed", "state", "both", "none"]
"""What a layer keeps: every token's keys, those of a window or a chunk, with index keys
beside them, a state, a state beside keys, or nothing."""

KIND_OF_NAME: Mapping[object, str] = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "sliding_attention": "window",
    "sliding_window": "window",
    "local": "window",
    "chunked_attention": "chunk",
    "indexed_attention": "indexed",
    "deepseek_sparse_attention": "indexed",
    "linear_attention": "state",
    "mamba": "state",
    "mamba2": "state",
    "conv": "state",
    "hybrid": "both",
    "moe": "none",
    "mlp": "none",
}
"""What the entries of ``layer_types`` stand for, older names included."""


def num_layers(fields: Fields) -> int:
    """Return the number of a model's layers."""
    return fields.count("num_hidden_layers", "n_layer", "num_layers", maximum=MAX_LAYERS)


def listed_kinds(fields: Fields, *lengths: int) -> list[str] | None:
    """Return the kinds that a config lists layer by layer, or None where it lists none."""
    for name in ("layer_types", "layers_block_type", "layer_block_type"):
        kinds = fields.per_layer(name, *lengths, known=KIND_OF_NAME)
        if kinds is not None:
            return kinds
    return None


def head_dim(fields: Fields, *names: str) -> int:
    """Return the numbers of a key: as named, else the hidden size divided by the heads."""
    if fields.has(*names, "head_dim"):
        return fields.count(*names, "head_dim")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise UnknownModelError(
            f"the config lacks head_dim, and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}",
            key="head_dim",
        )
    return hidden // heads


def key_values(
    fields: Fields,
    window: int | None = None,
    *,
    heads: tuple[str, ...] = ("num_key_value_heads",),
    dims: tuple[str, ...] = (),
    value_dims: tuple[str, ...] = (),
    all_heads: bool = False,
) -> KeyValueCache:
    """Return what one attention layer keeps.

    Args:
        fields: The config.
        window: The layer's window, if it has one.
        heads: The keys that may hold the number of key-value heads.
        dims: The keys that may hold the size of a key, before ``head_dim``.
        value_dims: The keys that may hold the size of a value; a key's by default.
        all_heads: Whether a config without ``heads`` means all attention heads.
    """
    if all_heads and not fields.has(*heads):
        heads = ("num_attention_heads",)
    key_dim = head_dim(fields, *dims)
    return KeyValueCache(
        num_heads=fields.count(*heads),
        key_dim=key_dim,
        value_dim=fields.count_or(key_dim, *value_dims) if value_dims else key_dim,
        window=window,
    )


def window_of(fields: Fields, kind: str) -> int | None:
    """Return the tokens that a layer of ``kind`` keeps; None where it keeps all.

    A chunk is kept as a window of its size, which is the most that a chunk holds.
    """
    if kind == "window":
        return fields.count("sliding_window", "attention_window_size", "window_size")
    if kind == "chunk":
        return fields.count("attention_chunk_size")
    return None


def latent(fields: Fields) -> LatentCache:
    """Return what an MLA layer keeps."""
    return LatentCache(
        lora_rank=fields.count("kv_lora_rank"),
        rope_dim=fields.count("qk_rope_head_dim", minimum=0),
    )


def index_keys(fields: Fields) -> IndexCache:
    """Return what a lightning indexer keeps."""
    if fields.has("index_kpool"):
        raise UnknownModelError(
            "index_kpool: the cache of an indexer that pools its keys is not known",
            key="index_kpool",
        )
    return IndexCache(head_dim=fields.count("index_head_dim"))


def has_indexer(fields: Fields, layers: int) -> list[bool]:
    """Return for each layer whether it has an indexer of its own, or shares an earlier one's.

    ``indexer_types`` or ``index_topk_pattern`` list it; otherwise the first layers up to
    ``index_skip_topk_offset`` have one, and then every ``index_topk_freq``-th.
    """
    known: Mapping[object, str] = dict(full="full", F="full", shared="shared", S="shared")
    for name in ("indexer_types", "index_topk_pattern"):
        kinds = fields.per_layer(name, layers, known=known)
        if kinds is not None:
            return [kind == "full" for kind in kinds]
    step = fields.count_or(1, "index_topk_freq")
    offset = fields.count_or(2, "index_skip_topk_offset", minimum=0)
    return [max(layer - offset + 1, 0) % step == 0 for layer in range(layers)]
