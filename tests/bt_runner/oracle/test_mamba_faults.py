"""Mistakes in the mixer are seen by the comparison with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.faults import CaseOf, Fault, Patch
from torch import Tensor
from torch.nn import functional

from bt_runner.dense.numerics import rms_norm
from bt_runner.models.config import MambaLayer, ModelConfig


def gate_after_norm(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The mixer's gate is applied after the norm."""
    silu, calls = functional.silu, []

    def late(x: Tensor) -> Tensor:
        # in a mixer the convolution's output comes first and the gate second
        calls.append(silu(x))
        return calls[-1] if len(calls) % 2 else torch.ones_like(x)

    def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps) * calls[-1].view_as(x)

    patch.setattr(functional, "silu", late)
    patch.setattr("bt_runner.dense.mamba.rms_norm", normed)
    return config


def one_norm_group(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The gated norm runs over all channels at once."""

    def over_all(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x.flatten(1), weight.flatten(), eps)

    patch.setattr("bt_runner.dense.mamba.rms_norm", over_all)
    return config


def wrong_group_map(patch: Patch, config: ModelConfig) -> ModelConfig:
    """Heads take turns with the groups' B and C."""

    def alternating(x: Tensor, layer: MambaLayer) -> Tensor:
        groups = x.view(len(x), layer.num_groups, layer.state_size)
        return groups.repeat(1, layer.num_heads // layer.num_groups, 1)

    patch.setattr("bt_runner.dense.mamba._per_head", alternating)
    return config


def reversed_taps(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The convolution's taps are applied newest first."""
    conv1d = functional.conv1d

    def reversed_conv(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
        return conv1d(x, weight.flip(-1), *rest, **named)

    patch.setattr(functional, "conv1d", reversed_conv)
    return config


@pytest.mark.parametrize("fault", [gate_after_norm, one_norm_group, wrong_group_map, reversed_taps])
def test_fault_is_seen(case_of: CaseOf, fault: Fault) -> None:
    """A mixer shows each of them."""
    case_of("mamba2").assert_seen(fault)
