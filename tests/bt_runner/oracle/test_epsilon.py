"""Each inner norm has the epsilon of its own: shown where its input is as small as that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.engine_oracle import engine_differences
from tests.support.engine_runs import CHUNKED, serve
from tests.support.faults import Case, Fault, Patch, with_indexer, with_mla
from tests.support.hf_models import FAMILIES, SEEDS, SPARSE_FAMILIES, load, prompts, tiny_model
from torch import Tensor

from bt_runner.dense.numerics import rms_norm
from bt_runner.models.checkpoint import load_weights, read_config
from bt_runner.models.config import ModelConfig

BEFORE_INNER_NORMS = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "wk.weight", "in_proj.weight")

CaseMaker = Callable[[str], Case]


@pytest.fixture(scope="module")
def small_inputs(tmp_path_factory: pytest.TempPathFactory) -> CaseMaker:
    """Return a family's model whose projections before the inner norms are a thousandth."""

    def made(family: str) -> Case:
        eps: dict[str, Any] = {} if family == "mamba2" else {"rms_norm_eps": 1e-5}
        model = tiny_model(family, seed=SEEDS[family], **eps)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if name.endswith(BEFORE_INNER_NORMS):
                    tensor.mul_(1e-3)
        directory: Path = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory)
        config = read_config(directory)
        weights = load_weights(directory, config, dtype=torch.float32)
        return Case(config, weights, prompts()[0], load(directory, torch.float32))

    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_right_epsilons_agree(small_inputs: CaseMaker, family: str) -> None:
    """The reference and the engine equal transformers where every epsilon counts."""
    case = small_inputs(family)

    run = serve(CHUNKED.engine(case.config, case.weights), [case.token_ids], 1)
    found = engine_differences(run, case.model)

    assert case.agrees(case.config)
    assert found.agree(), found


def models_epsilon_in_the_latents(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The latents are normed with the model's epsilon."""
    return with_mla(config, lambda mla: replace(mla, latent_norm_eps=config.norm_eps))


def models_epsilon_in_the_indexer(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The index keys are normed with the model's epsilon."""
    return with_indexer(config, norm_eps=config.norm_eps)


def latents_epsilon_in_the_mixer(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The mixer's gated norm has another epsilon than the model."""

    def smaller(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, 1e-6)

    patch.setattr("bt_runner.dense.mamba.rms_norm", smaller)
    return config


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        *[(family, models_epsilon_in_the_latents) for family in FAMILIES[:3]],
        *[(family, models_epsilon_in_the_indexer) for family in SPARSE_FAMILIES],
        ("mamba2", latents_epsilon_in_the_mixer),
    ],
)
def test_wrong_epsilon_is_seen(small_inputs: CaseMaker, family: str, fault: Fault) -> None:
    """Another epsilon anywhere is seen."""
    small_inputs(family).assert_seen(fault)
