"""Mistakes in the indexer are seen by the comparison with transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.faults import CaseOf, Fault, Patch, with_indexer
from tests.support.hf_models import SPARSE_FAMILIES
from torch import Tensor

from bt_runner.dense import selection
from bt_runner.dense.attention import attend
from bt_runner.models.config import AttentionLayer, ModelConfig, SelectTopK


def other_index_rope(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The indexer pairs its rotary dimensions the other way."""
    layer = config.layers[0]
    assert isinstance(layer, AttentionLayer)
    assert isinstance(layer.selection, SelectTopK)
    rope = layer.selection.rope
    return with_indexer(config, rope=replace(rope, interleaved=not rope.interleaved))


def no_relu(patch: Patch, config: ModelConfig) -> ModelConfig:
    """Negative products of the indexer count."""
    patch.setattr(Tensor, "relu_", lambda products: products)
    return config


def late_relu(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The indexer rectifies the sum over its heads and not each head's product."""
    patch.setattr(Tensor, "relu_", lambda products: products)
    scores = selection._scores
    patch.setattr(selection, "_scores", lambda *given: torch.relu(scores(*given)))
    return config


def softmaxed_head_weights(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The index heads' weights are made positive and to add up to one."""
    scores = selection._scores
    patch.setattr(selection, "_scores", lambda q, weights, k: scores(q, weights.softmax(dim=-1), k))
    return config


def doubled_scores(patch: Patch, config: ModelConfig) -> ModelConfig:
    """A constant factor on the scores changes no choice and no token: only the scores show it."""
    scores = selection._scores
    patch.setattr(selection, "_scores", lambda *given: 2 * scores(*given))
    return config


def one_fewer(patch: Patch, config: ModelConfig) -> ModelConfig:
    """One token less is chosen."""
    return with_indexer(config, topk=15)


def everything_chosen(patch: Patch, config: ModelConfig) -> ModelConfig:
    """Sparse layers see all."""
    return with_indexer(config, topk=1000)


def own_choice_after_shared(patch: Patch, config: ModelConfig) -> ModelConfig:
    """Layers that share a choice see what the first indexer chose, not the nearest below."""
    choices: list[Any] = []

    def first_choice(*given: Any) -> Any:
        given = (*given[:-1], choices[0] if choices else None)
        output, choice = attend(*given)
        choices.append(choice)
        return output, choice

    patch.setattr("bt_runner.dense.model.attend", first_choice)
    return config


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
@pytest.mark.parametrize(
    "fault",
    [
        other_index_rope,
        no_relu,
        late_relu,
        softmaxed_head_weights,
        doubled_scores,
        one_fewer,
        everything_chosen,
    ],
)
def test_fault_is_seen(case_of: CaseOf, family: str, fault: Fault) -> None:
    """Both families with indexers show a fault that either can have."""
    case_of(family).assert_seen(fault)


def test_choice_shared_from_the_wrong_layer_is_seen(case_of: CaseOf) -> None:
    """One family's model shares choices between layers."""
    case_of("glm_moe_dsa").assert_seen(own_choice_after_shared)
