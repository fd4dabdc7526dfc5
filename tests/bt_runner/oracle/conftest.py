"""Checkpoints that transformers wrote, once for all oracle tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from tests.support.faults import Case, CaseOf
from tests.support.hf_models import (
    SEEDS,
    Checkpoint,
    load,
    prompts,
    share_experts,
    tiny_model,
)

from bt_runner.models.checkpoint import load_weights, read_config


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return where a random model of a family lies."""

    @cache
    def saved(family: str, *, same_experts: bool = False) -> Path:
        directory = tmp_path_factory.mktemp(family)
        model = tiny_model(family, seed=SEEDS[family])
        if same_experts:
            share_experts(model)
        model.save_pretrained(directory)
        return directory

    return saved


@pytest.fixture(scope="session")
def case_of(checkpoint: Checkpoint) -> CaseOf:
    """Return a family's model with what transformers computes for it in float32."""

    @cache
    def made(family: str) -> Case:
        directory = checkpoint(family)
        config = read_config(directory)
        weights = load_weights(directory, config, dtype=torch.float32)
        return Case(config, weights, prompts()[0], load(directory, torch.float32))

    return made
