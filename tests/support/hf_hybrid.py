"""The built-in hybrid put together from transformers' own layers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tests.support.hf_models import perturb, transformers
from torch import Tensor, nn

from bt_runner.models.config import (
    MLP,
    AttentionLayer,
    LayerConfig,
    MambaLayer,
    ModelConfig,
    SelectTopK,
)


def hybrid_of_transformers(config: ModelConfig, *, seed: int) -> Any:
    """Return a float32 model that transformers can generate with, layer kinds as in ``config``."""
    shared = _attention_fields(config)
    sparse = transformers.DeepseekV32Config(**shared, **_indexer_fields(config))
    dense = transformers.DeepseekV3Config(**shared)
    model = transformers.DeepseekV32ForCausalLM(sparse)
    # the layers ask their configuration how to attend, and a model of its own was not made of this
    dense._attn_implementation = sparse._attn_implementation
    for index, layer in enumerate(config.layers):
        match layer:
            case MambaLayer():
                made = _mamba_block(config, layer, index)
            case AttentionLayer(selection=SelectTopK()):
                made = _class("deepseek_v32", "DeepseekV32DecoderLayer")(sparse, index)
            case AttentionLayer():
                made = _class("deepseek_v3", "DeepseekV3DecoderLayer")(dense, index)
        model.model.layers[index] = made
    perturb(model, seed)
    return model.eval()


def _class(family: str, name: str) -> Any:
    return getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)


def _attention_fields(config: ModelConfig) -> dict[str, Any]:
    layer = next(layer for layer in config.layers if isinstance(layer, AttentionLayer))
    mla, feed_forward = layer.mla, layer.feed_forward
    assert isinstance(feed_forward, MLP)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": feed_forward.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "first_k_dense_replace": len(config.layers),
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope.dim,
        "v_head_dim": mla.v_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _indexer_fields(config: ModelConfig) -> dict[str, Any]:
    attention = [layer for layer in config.layers if isinstance(layer, AttentionLayer)]
    indexer = next(
        layer.selection for layer in attention if isinstance(layer.selection, SelectTopK)
    )
    return {
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.topk,
        "layer_types": [_cache_kind(layer) for layer in config.layers],
    }


def _cache_kind(layer: LayerConfig) -> str:
    match layer:
        case MambaLayer():
            return "linear_attention"
        case AttentionLayer(selection=SelectTopK()):
            return "indexed_attention"
        case AttentionLayer():
            return "full_attention"


def _mamba_block(config: ModelConfig, layer: MambaLayer, index: int) -> Any:
    fields = transformers.Mamba2Config(
        hidden_size=config.hidden_size,
        num_hidden_layers=len(config.layers),
        num_heads=layer.num_heads,
        head_dim=layer.head_dim,
        state_size=layer.state_size,
        n_groups=layer.num_groups,
        conv_kernel=layer.conv_kernel,
        chunk_size=16,
        layer_norm_epsilon=config.norm_eps,
        residual_in_fp32=False,
    )
    block: nn.Module = _class("mamba2", "Mamba2Block")(fields, index)
    forward = block.forward

    def without_mask(hidden: Tensor, cache: Any = None, **_others: Any) -> Any:
        # the mask that attention layers are given is not the one a mixer takes
        return forward(hidden, cache=cache)

    block.forward = without_mask
    return block
