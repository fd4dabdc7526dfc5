"""Checkpoints that transformers wrote, once for all oracle tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from tests.support.hf_models import SEEDS, Checkpoint, settle_routers, tiny_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return where a random model of a family lies."""

    @cache
    def saved(family: str, *, settled: bool = False) -> Path:
        directory = tmp_path_factory.mktemp(family)
        model = tiny_model(family, seed=SEEDS[family])
        if settled:
            settle_routers(model)
        model.save_pretrained(directory)
        return directory

    return saved
