"""Experts in groups, as transformers chooses them, where corrections lie below every affinity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.engine_runs import CHUNKED, serve
from tests.support.hf_models import load, prompts, tiny_model
from tests.support.hf_recording import greedy

from bt_runner.models.checkpoint import load_weights, read_config

NUM_NEW = 12
ROUTER = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_no_expert_of_a_group_left_out_is_chosen(tmp_path: Path, family: str, seed: int) -> None:
    """Negative correction biases change no token of ``generate``.

    https://github.com/deepseek-ai/DeepSeek-V3/blob/main/inference/model.py masks the groups
    that were not chosen with minus infinity.
    """
    model = tiny_model(family, seed=seed, **ROUTER)
    model.save_pretrained(tmp_path)
    biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    theirs = load(tmp_path, torch.float64)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config, dtype=torch.float64)

    run = serve(CHUNKED.engine(config, weights), prompts(), NUM_NEW)

    assert all((bias < 0).all() for bias in biases)
    assert run.outputs == [greedy(theirs, token_ids, NUM_NEW) for token_ids in prompts()]
