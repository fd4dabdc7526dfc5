"""How far the dense reference lies from what transformers computed, in numbers that can fail."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.support.hf_recording import Recording
from torch import Tensor

from bt_runner.dense import DenseOutput
from bt_runner.models.config import AttentionLayer, ModelConfig, SelectTopK


@dataclass(frozen=True)
class Differences:
    """The largest differences of one forward pass.

    Attributes:
        logits: Over the range of the logits.
        layers: Absolute, of the residual stream, layer by layer.
        layers_in_range: The same, each over its layer's range.
        scores: Of the index scores that causality allows, over a layer's range.
        sets: Queries whose chosen tokens are not the same, over all indexers.
    """

    logits: float
    layers: tuple[float, ...]
    layers_in_range: tuple[float, ...]
    scores: float
    sets: int

    def agree(self) -> bool:
        """Whether the two implementations compute the same in float32."""
        return (
            self.logits < 2e-5 and max(self.layers) < 1e-5 and self.scores < 2e-5 and not self.sets
        )


def differences(config: ModelConfig, expected: Recording, actual: DenseOutput) -> Differences:
    """Compare all that one forward pass of a prompt shows."""
    pairs = list(zip(expected.layer_outputs, actual.layer_outputs, strict=True))
    scores, sets = 0.0, 0
    for index, layer in enumerate(config.layers):
        if not isinstance(layer, AttentionLayer) or not isinstance(layer.selection, SelectTopK):
            continue
        choice = actual.choices[index]
        assert choice is not None
        wanted_scores, wanted = expected.choices[index]
        seen = wanted_scores.isfinite()
        gap = _largest(wanted_scores[seen], choice.scores[seen])
        # a single score has no range
        scores = max(scores, gap / max(_range(wanted_scores[seen]), 1.0))
        sets += int((wanted != choice.chosen).any(dim=1).sum())
    return Differences(
        logits=_largest(expected.logits, actual.logits) / _range(expected.logits),
        layers=tuple(_largest(*pair) for pair in pairs),
        layers_in_range=tuple(_largest(*pair) / _range(pair[0]) for pair in pairs),
        scores=scores,
        sets=sets,
    )


def _largest(expected: Tensor, actual: Tensor) -> float:
    return (expected.double() - actual.double()).abs().max().item()


def _range(x: Tensor) -> float:
    return (torch.max(x) - torch.min(x)).item()
