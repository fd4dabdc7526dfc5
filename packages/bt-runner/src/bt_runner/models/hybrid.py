"""The built-in model: small, byte-level, and with one layer of every kind of cache."""

from __future__ import annotations

from bt_runner.models.config import (
    MLA,
    MLP,
    AttentionLayer,
    MambaLayer,
    ModelConfig,
    SelectAll,
    SelectTopK,
)
from bt_runner.models.layers.rope import Rope

NUM_BYTES = 256


def hybrid_config() -> ModelConfig:
    """Return the built-in hybrid: Mamba2, sparse MLA, dense MLA, twice over.

    Sixteen index heads make it all but impossible that two scores are exactly equal, and 64 chosen
    tokens are few beside the longest prompts, so that the choice matters.
    """
    rope = Rope(dim=8)
    mla = MLA(num_heads=4, q_lora_rank=48, kv_lora_rank=32, nope_dim=16, v_dim=16, rope=rope)
    indexer = SelectTopK(num_heads=16, head_dim=16, topk=64, rope=Rope(dim=8, interleaved=False))
    mlp = MLP(intermediate_size=128)
    mamba = MambaLayer(num_heads=8, head_dim=16, state_size=16, num_groups=2)
    sparse = AttentionLayer(mla=mla, selection=indexer, feed_forward=mlp)
    dense = AttentionLayer(mla=mla, selection=SelectAll(), feed_forward=mlp)
    return ModelConfig(
        vocab_size=NUM_BYTES,
        hidden_size=64,
        layers=(mamba, sparse, dense, mamba, sparse, dense),
    )
