"""Checkpoints in forms that people have them in give the tokens that transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.engine_runs import CHUNKED, serve
from tests.support.hf_models import load, prompts, tiny_model
from tests.support.hf_recording import greedy

from bt_runner.dense import DenseModel
from bt_runner.models.checkpoint import load_weights, read_config

NUM_NEW = 8
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 0, "mscale": 1.0, "mscale_all_dim": 0.7}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("family", "model_changes", "file_changes"),
    [
        pytest.param("deepseek_v3", {"q_lora_rank": None}, {}, id="no-query-latent"),
        pytest.param(
            "deepseek_v32", {}, {"rope_scaling": YARN, "rope_parameters": None}, id="yarn-no-length"
        ),
        pytest.param(
            "deepseek_v3",
            {},
            {"rope_scaling": YARN, "original_max_position_embeddings": 64},
            id="yarn-length-beside",
        ),
        pytest.param("glm_moe_dsa", {}, {"rope_scaling": PLAIN}, id="both-forms"),
        pytest.param(
            "glm_moe_dsa",
            {},
            {"index_topk_pattern": ["full", "full", "shared", "shared", "full"]},
            id="pattern-as-a-list",
        ),
        pytest.param("mamba2", {"tie_word_embeddings": True}, {}, id="tied"),
    ],
)
def test_tokens_equal_generate(
    tmp_path: Path, family: str, model_changes: dict[str, Any], file_changes: dict[str, Any]
) -> None:
    """Both read the same file, and so does the dense reference."""
    tiny_model(family, seed=3, **model_changes).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | file_changes))
    _require_tokens_of_generate(tmp_path)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "mamba2"])
@pytest.mark.parametrize("stored", ["equal", "another", "alone"])
def test_a_tied_head_that_is_stored(tmp_path: Path, family: str, stored: str) -> None:
    """An equal one is the embedding; another one is kept apart; without the other it is both."""
    tiny_model(family, seed=3, tie_word_embeddings=True).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = read_config(tmp_path).names.embedding
    tensors["lm_head.weight"] = tensors[name].flip(0) if stored == "another" else tensors[name] * 1
    if stored == "alone":
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})

    _require_tokens_of_generate(tmp_path)


def _require_tokens_of_generate(tmp_path: Path) -> None:
    theirs = load(tmp_path, torch.float64)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config, dtype=torch.float64)
    expected = [greedy(theirs, token_ids, NUM_NEW) for token_ids in prompts()]

    run = serve(CHUNKED.engine(config, weights), prompts(), NUM_NEW)
    dense = DenseModel(config, weights)
    text = prompts()[0] + expected[0]
    logits = dense.forward(text[:-1], dense.new_cache()).logits[len(prompts()[0]) - 1 :]

    assert run.outputs == expected
    assert logits.argmax(dim=-1).tolist() == expected[0]
