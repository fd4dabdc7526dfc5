"""Options that published checkpoints of the four families use or could use are read right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.engine_oracle import engine_differences
from tests.support.engine_runs import CHUNKED, serve
from tests.support.hf_models import load, prompts, tiny_model
from tests.support.hf_recording import record
from tests.support.oracle import differences

from bt_runner.dense import DenseModel
from bt_runner.models.checkpoint import load_weights, read_config

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 32}
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("half-rope", "deepseek_v3", {"rope_interleave": False}),
    ("biases", "deepseek_v3", {"attention_bias": True}),
    ("tied-head", "deepseek_v3", {"tie_word_embeddings": True}),
    ("plain-rope", "deepseek_v3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}),
    ("yarn-without-mscale", "deepseek_v32", {"rope_parameters": YARN | {"rope_theta": 1e4}}),
    ("two-shared-experts", "deepseek_v32", {"n_shared_experts": 2}),
    ("raw-expert-weights", "deepseek_v32", {"norm_topk_prob": False}),
    ("all-dense", "deepseek_v32", {"first_k_dense_replace": 3}),
    (
        "sparse-below-dense",
        "glm_moe_dsa",
        {"mlp_layer_types": ["sparse", "dense"] + ["sparse"] * 3},
    ),
    ("indexer-pattern", "glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FSFSS"}),
    ("indexer-every-third", "glm_moe_dsa", {"indexer_types": None, "index_topk_freq": 3}),
    (
        "indexer-offset",
        "glm_moe_dsa",
        {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 3},
    ),
    ("biases", "mamba2", {"use_bias": True}),
    ("no-conv-bias", "mamba2", {"use_conv_bias": False}),
    ("tied-head", "mamba2", {"tie_word_embeddings": True}),
    ("narrow-conv", "mamba2", {"conv_kernel": 2}),
    ("low-residual", "mamba2", {"residual_in_fp32": False}),
]


@pytest.mark.parametrize(
    ("family", "changes"), [pytest.param(*case[1:], id="-".join(case[1::-1])) for case in VARIANTS]
)
def test_variant_equals_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """The reference and the engine understand what transformers wrote as transformers does."""
    tiny_model(family, seed=0, **changes).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    dense = DenseModel(config, load_weights(tmp_path, config, dtype=torch.float32))
    token_ids = prompts()[3]

    model = load(tmp_path, torch.float32)
    expected = record(model, token_ids)
    found = differences(config, expected, dense.forward(token_ids, dense.new_cache()))
    run = serve(CHUNKED.engine(config, dense.weights), [token_ids], 3)
    of_engine = engine_differences(run, model)

    assert found.agree(), found
    assert of_engine.agree(), of_engine
