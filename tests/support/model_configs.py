"""Minimal config files of our own, with the dimensions of published models; where real ones lie."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

Config = dict[str, object]

_REPOSITORY = Path(__file__).parents[2]


def data_file(*parts: str) -> Path:
    """Return a file of the folder ``BT_DATA`` (``../shared/data``); skip the test without it."""
    folder = Path(os.environ.get("BT_DATA", "../shared/data"))
    path = (_REPOSITORY / folder).joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{Path(*parts)} is not in BT_DATA")
    return path


def write_config(folder: Path, config: Config) -> Path:
    """Write a config file and return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def deepseek_v3() -> Config:
    """Return DeepSeek-V3: 61 layers of MLA."""
    return {
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }


def deepseek_v32() -> Config:
    """Return DeepSeek-V3.2: DeepSeek-V3 with an indexer in every layer."""
    return {
        **deepseek_v3(),
        "model_type": "deepseek_v32",
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
    }


def deepseek_v2_lite() -> Config:
    """Return DeepSeek-V2-Lite, as far as its cache goes."""
    return {
        "model_type": "deepseek_v2",
        "torch_dtype": "bfloat16",
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "num_hidden_layers": 27,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
    }


def glm_5() -> Config:
    """Return GLM-5: 78 layers, each with an indexer."""
    return {
        **deepseek_v32(),
        "model_type": "glm_moe_dsa",
        "hidden_size": 6144,
        "index_n_heads": 32,
        "max_position_embeddings": 202752,
        "num_attention_heads": 64,
        "num_hidden_layers": 78,
    }


def glm_5_2() -> Config:
    """Return GLM-5.2: GLM-5 with an indexer in the first three layers and in every fourth after."""
    kinds = ["full" if layer < 3 or layer % 4 == 2 else "shared" for layer in range(78)]
    return {**glm_5(), "indexer_types": kinds, "max_position_embeddings": 1_048_576}


def nemotron_h_8b() -> Config:
    """Return Nemotron-H-8B: 24 layers of Mamba2, 4 of attention, and MLPs between them."""
    return {
        "model_type": "nemotron_h",
        "torch_dtype": "bfloat16",
        "attention_head_dim": 128,
        "conv_kernel": 4,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "mamba_head_dim": 64,
        "mamba_num_heads": 128,
        "max_position_embeddings": 8192,
        "n_groups": 8,
        "num_hidden_layers": 52,
        "num_key_value_heads": 8,
        "ssm_state_size": 128,
    }


def falcon_h1() -> Config:
    """Return Falcon-H1-0.5B: 36 layers, each with attention beside Mamba2."""
    return {
        "model_type": "falcon_h1",
        "torch_dtype": "bfloat16",
        "head_dim": 64,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_n_heads": 24,
        "max_position_embeddings": 16384,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
    }


def mamba2() -> Config:
    """Return a Mamba2 of 64 layers with the dimensions of mamba2-2.7b, and no length."""
    return {
        "model_type": "mamba2",
        "dtype": "bfloat16",
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 64,
        "hidden_size": 2560,
        "n_groups": 1,
        "num_heads": 80,
        "num_hidden_layers": 64,
        "state_size": 128,
        "vocab_size": 50288,
    }
