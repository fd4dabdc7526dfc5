"""Small checkpoints written without transformers, to be broken one way at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bt_runner.models.checkpoint import read_config
from bt_runner.models.weights import random_weights

MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "state_size": 4,
    "n_groups": 1,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 8,
    "moe_intermediate_size": 4,
    "num_attention_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
}


def write_config(directory: Path, fields: dict[str, Any], **changes: Any) -> None:
    """Write ``config.json``; a change to None leaves the field out."""
    kept = {name: value for name, value in (fields | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept), encoding="utf-8")


def write_tensors(directory: Path, fields: dict[str, Any]) -> dict[str, Tensor]:
    """Write a whole checkpoint of one file and return its tensors."""
    write_config(directory, fields)
    weights = random_weights(read_config(directory), seed=0, dtype=torch.float32)
    save_file(weights, directory / "model.safetensors")
    return weights


def write_shards(directory: Path, weights: dict[str, Tensor], num_shards: int) -> None:
    """Write tensors to several files with an index."""
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(weights.items())[shard::num_shards])
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
