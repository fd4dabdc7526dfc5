"""The dense reference equals transformers: logits, layers, choices, caches and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.bt_runner.harness import dense_greedy
from tests.support.faults import with_indexer
from tests.support.hf_models import FAMILIES, SPARSE_FAMILIES, Checkpoint, load, prompts, tiny_model
from tests.support.hf_recording import greedy, record
from tests.support.oracle import differences

from bt_runner.dense import AttentionCache, DenseModel, MambaCache
from bt_runner.models.checkpoint import load_weights, read_config
from bt_runner.models.config import AttentionLayer, SelectTopK

NUM_NEW = 12
DTYPES = [
    pytest.param(torch.float64, id="float64"),
    pytest.param(torch.float32, id="float32"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_equals_transformers(
    checkpoint: Checkpoint, family: str, dtype: torch.dtype
) -> None:
    """Layer outputs lie within 1e-5, logits within 2e-5 of their range, and choices are equal."""
    directory = checkpoint(family)
    config = read_config(directory)
    dense = DenseModel(config, load_weights(directory, config, dtype=dtype))
    model = load(directory, dtype)

    for token_ids in prompts():
        found = differences(
            config, record(model, token_ids), dense.forward(token_ids, dense.new_cache())
        )
        assert found.agree(), found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(
    checkpoint: Checkpoint, family: str, dtype: torch.dtype
) -> None:
    """Prefill and steps give what ``generate`` gives, request by request."""
    directory = checkpoint(family)
    config = read_config(directory)
    dense = DenseModel(config, load_weights(directory, config, dtype=dtype))
    model = load(directory, dtype)

    for token_ids in prompts():
        assert dense_greedy(dense, token_ids, NUM_NEW) == greedy(model, token_ids, NUM_NEW)


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_equal_transformers(checkpoint: Checkpoint, family: str) -> None:
    """What a later step reads is the same: latents, turned keys, index keys and states."""
    directory = checkpoint(family)
    config = read_config(directory)
    dense = DenseModel(config, load_weights(directory, config, dtype=torch.float32))
    token_ids = prompts()[0]

    expected = record(load(directory, torch.float32), token_ids).cache.layers
    cache = dense.new_cache()
    dense.forward(token_ids, cache)

    for layer, theirs, ours in zip(config.layers, expected, cache.layers, strict=True):
        if isinstance(ours, AttentionCache):
            torch.testing.assert_close(ours.latent, theirs.keys[0, 0], atol=1e-5, rtol=0)
            torch.testing.assert_close(ours.rope_key, theirs.values[0, 0], atol=1e-5, rtol=0)
            assert isinstance(layer, AttentionLayer)
            if isinstance(layer.selection, SelectTopK):
                keys = theirs.indexer_keys[0]
                torch.testing.assert_close(ours.index_key, keys, atol=1e-5, rtol=0)
        else:
            assert isinstance(ours, MambaCache)
            # theirs is one column wider than any later step needs
            conv = theirs.conv_states[0][0, :, 1:].T
            torch.testing.assert_close(ours.conv, conv, atol=1e-5, rtol=0)
            state = theirs.recurrent_states[0][0]
            torch.testing.assert_close(ours.state, state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_layers_lie_within_a_fiftieth_of_their_range(
    checkpoint: Checkpoint, family: str
) -> None:
    """Where rounding changes no choice, bfloat16 outputs differ by rounding alone.

    All tokens share their experts, and the prompt is no longer than an index choice.
    """
    directory = checkpoint(family, same_experts=True)
    config = read_config(directory)
    dense = DenseModel(config, load_weights(directory, config, dtype=torch.bfloat16))
    token_ids = prompts()[0][:16]

    expected = record(load(directory, torch.bfloat16), token_ids)
    found = differences(config, expected, dense.forward(token_ids, dense.new_cache()))

    assert max(found.layers_in_range) < 2e-2, found


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_bfloat16_choices_are_nearly_the_same(checkpoint: Checkpoint, family: str) -> None:
    """The first indexer, whose input is exact, chooses 95 % of the tokens that theirs does."""
    directory = checkpoint(family)
    config = read_config(directory)
    dense = DenseModel(config, load_weights(directory, config, dtype=torch.bfloat16))
    token_ids = prompts()[0]

    _, expected = record(load(directory, torch.bfloat16), token_ids).choices[0]
    choice = dense.forward(token_ids, dense.new_cache()).choices[0]

    assert choice is not None
    assert (expected & choice.chosen).sum() > 0.95 * expected.sum()


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_choice_decides_the_tokens(checkpoint: Checkpoint, family: str) -> None:
    """Told to see all, a sparse model writes something else after every prompt above a choice."""
    directory = checkpoint(family)
    config = read_config(directory)
    weights = load_weights(directory, config, dtype=torch.float64)

    for token_ids in prompts():
        texts = [
            dense_greedy(DenseModel(told, weights), token_ids, NUM_NEW)
            for told in (config, with_indexer(config, topk=1000))
        ]
        assert (texts[0] != texts[1]) == (len(token_ids) > 16)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_equals_transformers_for_many_seeds(tmp_path: Path, family: str, seed: int) -> None:
    """Other weights agree as well; a choice may differ where its gap is below rounding."""
    tiny_model(family, seed=1000 + seed).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    dense = DenseModel(config, load_weights(tmp_path, config, dtype=torch.float32))
    model = load(tmp_path, torch.float32)

    for token_ids in prompts():
        output = dense.forward(token_ids, dense.new_cache())
        gaps = [choice.gaps().min() for choice in output.choices if choice is not None]
        if min(gaps, default=1.0) > 1e-4:
            found = differences(config, record(model, token_ids), output)
            assert found.sets == 0, found
            assert max(found.logits, found.scores, *found.layers_in_range) < 2e-5, found


@pytest.mark.parametrize("family", FAMILIES)
def test_seeds_leave_gaps(checkpoint: Checkpoint, family: str) -> None:
    """No token and no choice of these tests is decided by less than rounding could move.

    If it fails after an upgrade, the weights drawn from a seed changed: choose another seed.
    """
    directory = checkpoint(family)
    config = read_config(directory)
    dense = DenseModel(config, load_weights(directory, config, dtype=torch.float64))

    for token_ids in prompts():
        text = token_ids + dense_greedy(dense, token_ids, NUM_NEW)
        output = dense.forward(text, dense.new_cache())
        best = output.logits[len(token_ids) - 1 : -1].topk(2, dim=1).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-2
        for choice in output.choices:
            assert choice is None or choice.gaps().min() > 1e-4
