"""Random weights: as many as the model has, the same on every call, and far from trivial."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from bt_runner.models.config import (
    MLA,
    MLP,
    AttentionLayer,
    ModelConfig,
    MoE,
    SelectAll,
    Selection,
    SelectTopK,
    hybrid_config,
)
from bt_runner.models.layers.numerics import Rope
from bt_runner.models.weights import random_weights, tensor_dtype, tensor_shapes


def test_random_weights_are_those_of_the_table() -> None:
    """Every tensor of the model is drawn, in the shape it has."""
    config = hybrid_config()

    weights = random_weights(config, seed=0, dtype=torch.float32)

    assert {name: tuple(w.shape) for name, w in weights.items()} == tensor_shapes(config)
    assert all(w.isfinite().all() for w in weights.values())


def test_seed_decides_the_weights() -> None:
    """One seed gives one model, in every dtype; another seed another."""
    config = hybrid_config()
    name = config.names.head

    one = random_weights(config, seed=1, dtype=torch.float64)[name]

    assert torch.equal(one, random_weights(config, seed=1, dtype=torch.float64)[name])
    assert torch.equal(one.float(), random_weights(config, seed=1, dtype=torch.float32)[name])
    assert not torch.equal(one, random_weights(config, seed=2, dtype=torch.float64)[name])


def test_no_norm_or_bias_is_trivial() -> None:
    """A norm of ones or a bias of zeros would hide that it is forgotten."""
    weights = random_weights(hybrid_config(), seed=0, dtype=torch.float64)

    for name, tensor in weights.items():
        if tensor.dim() == 1:
            assert tensor.std() > 0.05, name


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("model.layers.3.mlp.gate.weight", torch.bfloat16, torch.float32),
        ("model.layers.3.mlp.gate_proj.weight", torch.bfloat16, torch.bfloat16),
        ("backbone.layers.0.mixer.A_log", torch.float16, torch.float32),
        ("backbone.layers.0.mixer.A_log", torch.float64, torch.float64),
        ("model.layers.0.self_attn.indexer.weights_proj.weight", torch.bfloat16, torch.float32),
    ],
)
def test_what_decides_is_never_below_float32(
    name: str, dtype: torch.dtype, expected: torch.dtype
) -> None:
    """Routers, head weights and decays keep float32 in a model of a narrower dtype."""
    assert tensor_dtype(name, dtype) == expected


def _deepseek_v3(selection: Selection) -> ModelConfig:
    mla = MLA(
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_dim=128,
        v_dim=128,
        rope=Rope(dim=64),
    )
    moe = MoE(num_experts=256, top_k=8, intermediate_size=2048, num_groups=8, top_groups=4)
    dense = AttentionLayer(mla=mla, selection=selection, feed_forward=MLP(intermediate_size=18432))
    return ModelConfig(
        vocab_size=129_280,
        hidden_size=7168,
        layers=(dense,) * 3 + (replace(dense, feed_forward=moe),) * 58,
    )


def test_published_model_has_its_published_size() -> None:
    """DeepSeek-V3 has 671 billion parameters, and an indexer in every layer adds 0.9."""
    indexer = SelectTopK(num_heads=64, head_dim=128, topk=2048, rope=Rope(dim=64))

    sizes = [
        sum(math.prod(shape) for shape in tensor_shapes(_deepseek_v3(selection)).values())
        for selection in (SelectAll(), indexer)
    ]

    assert [round(size / 1e9, 1) for size in sizes] == [671.0, 671.9]
