"""The built-in hybrid equals one put together from transformers' own layers."""

from __future__ import annotations

import pytest
import torch
from tests.support.hf_hybrid import hybrid_of_transformers
from tests.support.hf_recording import greedy, record
from tests.support.oracle import differences
from tests.support.runs import dense_greedy

from bt_runner.dense import DenseModel
from bt_runner.models.hybrid import hybrid_config
from bt_runner.models.weights import tensor_dtype, tensor_shapes

SEED = 3
# one token, one past an index choice, and two that are longer
LENGTHS = (1, 65, 90, 150)


def _prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(256, (length,), generator=generator).tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_hybrid_equals_transformers_layers(dtype: torch.dtype) -> None:
    """Every layer, score, choice and token is that of transformers' layers in one model."""
    config = hybrid_config()
    model = hybrid_of_transformers(config, seed=SEED)
    weights = {
        name: tensor.to(tensor_dtype(name, dtype)) for name, tensor in model.state_dict().items()
    }
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == tensor_shapes(config)
    dense = DenseModel(config, weights)
    model = model.to(dtype)

    for length in LENGTHS:
        token_ids = _prompt(length)
        expected = record(model, token_ids)
        found = differences(config, expected, dense.forward(token_ids, dense.new_cache()))
        assert found.agree(), found
        assert dense_greedy(dense, token_ids, 8) == greedy(model, token_ids, 8)
