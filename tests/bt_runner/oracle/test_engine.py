"""The engine equals transformers: several requests at once against ``generate``, one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.bt_runner.harness import SpoiledDrafter, Traffic
from tests.support.engine_oracle import cached, engine_differences
from tests.support.engine_runs import (
    ALIGNED,
    ALIGNED_CHUNKED,
    CHUNKED,
    DRAFTED,
    DRAFTED_ALIGNED,
    LATE,
    TOGETHER,
    Run,
    Way,
    serve,
)
from tests.support.hf_models import FAMILIES, Checkpoint, load, prompts
from tests.support.hf_recording import greedy, record
from torch import Tensor

from bt_runner.models.checkpoint import load_weights, read_config
from bt_runner.models.config import ModelConfig

NUM_NEW = 12
WAYS = [
    pytest.param(TOGETHER, id="together"),
    pytest.param(CHUNKED, id="chunked"),
    pytest.param(LATE, id="late"),
    pytest.param(DRAFTED, id="drafted"),
]
# no more than the longest request needs: 52 tokens in blocks of 8
SCARCE = replace(CHUNKED, num_blocks=1 + 7)
# and of states, that of the last token and what a step may move on from it
SCARCE_STATES = replace(ALIGNED_CHUNKED, num_blocks=1 + 4)


class Oracle:
    """What ``generate`` gives each prompt, and the engine's half of the comparison.

    Attributes:
        transformers: A family's model of a dtype, loaded once.
        expected: What ``generate`` gives each prompt, computed once.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Keep where checkpoints lie."""
        self._checkpoint = checkpoint
        self.expected = cache(self._expected)
        self.transformers = cache(self._transformers)

    def _transformers(self, family: str, dtype: torch.dtype) -> Any:
        return load(self._checkpoint(family), dtype)

    def _expected(self, family: str, dtype: torch.dtype) -> list[list[int]]:
        model = self.transformers(family, dtype)
        return [greedy(model, token_ids, NUM_NEW) for token_ids in prompts()]

    def model(self, family: str, dtype: torch.dtype) -> tuple[ModelConfig, dict[str, Tensor]]:
        """Return a family's configuration and weights."""
        directory = self._checkpoint(family)
        config = read_config(directory)
        return config, load_weights(directory, config, dtype=dtype)

    def serve(self, family: str, dtype: torch.dtype, way: Way) -> Run:
        """Serve all prompts with the engine."""
        return serve(way.engine(*self.model(family, dtype)), prompts(), NUM_NEW, way.late)


@pytest.fixture(scope="module")
def oracle(checkpoint: Checkpoint) -> Oracle:
    """Return both halves of the comparison."""
    return Oracle(checkpoint)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_generate(oracle: Oracle, family: str, way: Way) -> None:
    """Batched, in chunks, joining late or with drafts: the tokens are the same."""
    run = oracle.serve(family, torch.float64, way)

    assert run.outputs == oracle.expected(family, torch.float64)


@pytest.mark.parametrize(
    ("family", "way"),
    [*[(family, SCARCE) for family in FAMILIES[:3]], ("mamba2", SCARCE_STATES)],
    ids=FAMILIES,
)
def test_preempted_requests_equal_generate(oracle: Oracle, family: str, way: Way) -> None:
    """Requests that lost their blocks and started over give the same tokens."""
    run = oracle.serve(family, torch.float64, way)

    assert run.num_preemptions > 0
    assert run.outputs == oracle.expected(family, torch.float64)


@pytest.mark.parametrize("way", [ALIGNED, ALIGNED_CHUNKED], ids=["whole", "chunked"])
def test_states_kept_along_the_way_equal_generate(oracle: Oracle, way: Way) -> None:
    """Mamba states that move from block to block give the same tokens."""
    run = oracle.serve("mamba2", torch.float64, way)

    assert run.outputs == oracle.expected("mamba2", torch.float64)


@pytest.mark.parametrize("way", [TOGETHER, CHUNKED], ids=["together", "chunked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_layers_and_logits_equal_transformers(
    oracle: Oracle, family: str, way: Way
) -> None:
    """Layers lie within 1e-5, logits within 2e-5 of their range, and tokens are the same."""
    run = oracle.serve(family, torch.float32, way)

    found = engine_differences(run, oracle.transformers(family, torch.float32))

    assert found.agree(), found
    assert run.outputs == oracle.expected(family, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_layers_lie_within_a_fiftieth_of_their_range(
    checkpoint: Checkpoint, family: str
) -> None:
    """Where rounding changes no choice, a prompt in chunks differs by rounding alone."""
    directory = checkpoint(family, same_experts=True)
    config = read_config(directory)
    weights = load_weights(directory, config, dtype=torch.bfloat16)

    run = serve(CHUNKED.engine(config, weights), [prompts()[0][:16]], 1)
    found = engine_differences(run, load(directory, torch.bfloat16))

    assert len(run.recorder.observations[run.requests[0].request_id]) == 3
    assert found.layers_in_range < 2e-2, found


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    ("family", "way"),
    [*[(family, DRAFTED) for family in FAMILIES], ("mamba2", DRAFTED_ALIGNED)],
    ids=[*FAMILIES, "mamba2-aligned"],
)
def test_drafts_change_no_token(oracle: Oracle, family: str, way: Way, acceptance: float) -> None:
    """With drafts that are wrong, right or both, the tokens are those of ``generate``."""
    expected = oracle.expected(family, torch.float64)
    drafter = SpoiledDrafter(
        Traffic(prompts(), []), expected, acceptance, seed=1, is_ragged=acceptance == 0.6
    )
    config, weights = oracle.model(family, torch.float64)

    run = serve(way.engine(config, weights, drafter), prompts(), NUM_NEW)

    found = engine_differences(run, oracle.transformers(family, torch.float64))

    assert run.outputs == expected
    assert found.agree(), found


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_equal_transformers(oracle: Oracle, family: str) -> None:
    """What blocks and states hold after a prompt in chunks is what transformers keeps."""
    config, weights = oracle.model(family, torch.float32)
    engine = replace(CHUNKED, max_steps_in_flight=1).engine(config, weights)
    token_ids = prompts()[0]
    request = engine.add_request(token_ids)
    while request.num_computed < len(token_ids):
        engine.step()

    kept = record(oracle.transformers(family, torch.float32), token_ids).cache.layers

    for tensor in (tensor for group in engine.groups for tensor in group.tensors):
        theirs = kept[tensor.layer]
        match tensor.name:
            case "latent":
                wanted = torch.cat([theirs.keys[0, 0], theirs.values[0, 0]], dim=-1)
            case "index":
                wanted = theirs.indexer_keys[0]
            case "conv":
                wanted = theirs.conv_states[0][0, :, 1:].T
            case _:
                wanted = theirs.recurrent_states[0][0]
        ours = cached(engine, request, tensor.layer, tensor.name)
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
