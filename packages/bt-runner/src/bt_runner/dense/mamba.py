"""Mamba2 as the recurrence it is defined by: one token after another, no chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bt_runner.dense.numerics import rms_norm, widen
from bt_runner.models.config import MambaLayer
from bt_runner.models.layers.numerics import Scope


@dataclass(slots=True)
class MambaCache:
    """What one layer keeps of the tokens seen so far, however many.

    Attributes:
        conv: ``[conv_kernel - 1, conv_channels]``, the convolution's last inputs, oldest first.
        state: ``[num_heads, head_dim, state_size]``, at least float32.
    """

    conv: Tensor
    state: Tensor


def empty_mamba_cache(layer: MambaLayer, dtype: torch.dtype, device: torch.device) -> MambaCache:
    """Return the cache of a request that has no tokens yet."""
    return MambaCache(
        torch.zeros(layer.conv_kernel - 1, layer.conv_channels, dtype=dtype, device=device),
        torch.zeros(
            layer.num_heads,
            layer.head_dim,
            layer.state_size,
            dtype=torch.promote_types(dtype, torch.float32),
            device=device,
        ),
    )


def mix(x: Tensor, layer: MambaLayer, scope: Scope, cache: MambaCache, norm_eps: float) -> Tensor:
    """Return the mixer's output for ``x``, ``[T, hidden]``; the cache moves on by ``T`` tokens."""
    gate, conv_input, step = scope.project(x, "in_proj").split_with_sizes(
        [layer.inner_size, layer.conv_channels, layer.num_heads], dim=-1
    )
    window = torch.cat([cache.conv, conv_input])
    cache.conv = window[len(x) :]
    bias = scope["conv1d.bias"] if layer.has_conv_bias else None
    mixed = functional.conv1d(
        window.T[None], scope["conv1d.weight"], bias, groups=layer.conv_channels
    )
    bc_size = layer.num_groups * layer.state_size
    inputs, b, c = functional.silu(mixed[0].T).split_with_sizes(
        [layer.inner_size, bc_size, bc_size], dim=-1
    )
    step = functional.softplus(widen(step) + widen(scope["dt_bias"]))
    decay = torch.exp(-step * torch.exp(widen(scope["A_log"])))
    heads = widen(inputs).view(len(x), layer.num_heads, layer.head_dim)
    y = _recur(heads * step[..., None], decay, _per_head(b, layer), _per_head(c, layer), cache)
    y = y + heads * widen(scope["D"])[:, None]
    gated = (y.reshape(len(x), -1) * functional.silu(widen(gate))).view(
        len(x), layer.num_groups, -1
    )
    norm = scope["norm.weight"].view(layer.num_groups, -1)
    normed = rms_norm(gated, norm, norm_eps).view(len(x), -1)
    return scope.project(normed, "out_proj")


def _per_head(x: Tensor, layer: MambaLayer) -> Tensor:
    """Return ``[T, num_heads, state_size]``: every head's copy of its group's B or C."""
    groups = widen(x).view(len(x), layer.num_groups, layer.state_size)
    return groups.repeat_interleave(layer.num_heads // layer.num_groups, dim=1)


def _recur(inputs: Tensor, decay: Tensor, b: Tensor, c: Tensor, cache: MambaCache) -> Tensor:
    """Return ``[T, num_heads, head_dim]`` and leave the last state in the cache."""
    state = cache.state
    outputs = []
    columns = zip(
        inputs[..., None].unbind(),
        decay[..., None, None].unbind(),
        b[:, :, None].unbind(),
        c[..., None].unbind(),
        strict=True,
    )
    for x, fade, write, read in columns:
        state = torch.addcmul(state * fade, x, write)
        outputs.append(state @ read)
    cache.state = state
    return torch.stack(outputs).squeeze(-1)
