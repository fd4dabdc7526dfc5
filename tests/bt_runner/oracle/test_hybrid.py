"""The built-in hybrid equals one put together from transformers' own layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.bt_runner.harness import dense_greedy
from tests.support.engine_oracle import engine_differences
from tests.support.engine_runs import ALIGNED, CHUNKED, DRAFTED, DRAFTED_ALIGNED, Way, serve
from tests.support.hf_hybrid import hybrid_of_transformers
from tests.support.hf_recording import greedy, record
from tests.support.oracle import differences
from torch import Tensor

from bt_runner.dense import DenseModel
from bt_runner.models.config import hybrid_config
from bt_runner.models.weights import tensor_dtype, tensor_shapes

SEED = 3
# one token, one past an index choice, and two that are longer
CHUNKED_16 = replace(CHUNKED, limits=replace(CHUNKED.limits, max_num_batched_tokens=16))
LENGTHS = (1, 65, 90, 150)


def _prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(256, (length,), generator=generator).tolist()


def _weights(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.to(tensor_dtype(name, dtype)) for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_hybrid_equals_transformers_layers(dtype: torch.dtype) -> None:
    """Every layer, score, choice and token is that of transformers' layers in one model."""
    config = hybrid_config()
    model = hybrid_of_transformers(config, seed=SEED)
    weights = _weights(model, dtype)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == tensor_shapes(config)
    dense = DenseModel(config, weights)
    model = model.to(dtype)

    for length in LENGTHS:
        token_ids = _prompt(length)
        expected = record(model, token_ids)
        found = differences(config, expected, dense.forward(token_ids, dense.new_cache()))
        assert found.agree(), found
        assert dense_greedy(dense, token_ids, 8) == greedy(model, token_ids, 8)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(CHUNKED_16, id="chunked"),
        pytest.param(replace(CHUNKED_16, num_blocks=1 + 20, options=ALIGNED.options), id="aligned"),
        pytest.param(DRAFTED, id="drafted"),
        pytest.param(DRAFTED_ALIGNED, id="drafted-aligned"),
    ],
)
def test_engine_equals_transformers_layers(way: Way) -> None:
    """Requests batched, in chunks, with few blocks or drafts, against ``generate`` one by one."""
    config = hybrid_config()
    model = hybrid_of_transformers(config, seed=SEED)
    texts = [_prompt(length) for length in LENGTHS]

    run = serve(way.engine(config, _weights(model, torch.float32)), texts, 8)
    found = engine_differences(run, model)

    assert found.agree(), found
    assert run.outputs == [greedy(model, text, 8) for text in texts]
    assert (run.num_preemptions > 0) == (way.num_blocks is not None)
