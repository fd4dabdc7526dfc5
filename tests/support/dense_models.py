"""The dense reference of the built-in hybrid, with weights drawn from a seed."""

from __future__ import annotations

import torch

from bt_runner.dense import DenseModel
from bt_runner.models.config import hybrid_config
from bt_runner.models.weights import random_weights


def hybrid(dtype: torch.dtype = torch.float64) -> DenseModel:
    """Return the built-in hybrid."""
    config = hybrid_config()
    return DenseModel(config, random_weights(config, seed=0, dtype=dtype))
