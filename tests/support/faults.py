"""Mistakes made on purpose in the dense reference, and the comparison that must see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.hf_recording import record
from tests.support.oracle import differences
from torch import Tensor

from bt_runner.dense import DenseModel
from bt_runner.models.config import (
    MLA,
    AttentionLayer,
    LayerConfig,
    ModelConfig,
    MoE,
    SelectTopK,
)

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch, ModelConfig], ModelConfig]


class Case:
    """A model that agrees with transformers as long as nothing is wrong with it.

    Attributes:
        config: The configuration.
        weights: Float32 weights.
        token_ids: A prompt.
        model: The model as transformers loaded it.
        expected: What transformers computes for the prompt.
    """

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], token_ids: list[int], model: Any
    ) -> None:
        """Run transformers once."""
        self.config = config
        self.weights = weights
        self.token_ids = token_ids
        self.model = model
        self.expected = record(model, token_ids)

    def agrees(self, config: ModelConfig) -> bool:
        """Whether the reference, told ``config``, computes what transformers does."""
        dense = DenseModel(config, self.weights)
        output = dense.forward(self.token_ids, dense.new_cache())
        return differences(self.config, self.expected, output).agree()

    def assert_seen(self, fault: Fault) -> None:
        """Check that the comparison passes without the fault and fails with it."""
        assert self.agrees(self.config)
        with pytest.MonkeyPatch.context() as patch:
            assert not self.agrees(fault(patch, self.config))


CaseOf = Callable[[str], Case]


def each_layer(config: ModelConfig, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
    """Return a configuration with every layer changed."""
    return replace(config, layers=tuple(change(layer) for layer in config.layers))


def with_mla(config: ModelConfig, change: Callable[[MLA], MLA]) -> ModelConfig:
    """Return a configuration with every attention changed."""

    def of(layer: LayerConfig) -> LayerConfig:
        return replace(layer, mla=change(layer.mla)) if isinstance(layer, AttentionLayer) else layer

    return each_layer(config, of)


def with_indexer(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return a configuration with every indexer changed."""

    def of(layer: LayerConfig) -> LayerConfig:
        if isinstance(layer, AttentionLayer) and isinstance(layer.selection, SelectTopK):
            return replace(layer, selection=replace(layer.selection, **changes))
        return layer

    return each_layer(config, of)


def with_moe(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return a configuration with every mixture of experts changed."""

    def of(layer: LayerConfig) -> LayerConfig:
        if isinstance(layer, AttentionLayer) and isinstance(layer.feed_forward, MoE):
            return replace(layer, feed_forward=replace(layer.feed_forward, **changes))
        return layer

    return each_layer(config, of)
