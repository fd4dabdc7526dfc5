"""Mamba2's recurrence: a causal convolution and a decaying state; it knows no cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


class Inputs(NamedTuple):
    """What drives the state, token by token.

    Attributes:
        values: ``[B, T, H, P]``.
        steps: ``[B, T, H]``, how much of a value enters and how fast the state decays.
        decay: ``[H]``, negative.
        keys: ``[B, T, H, N]``, where a value is stored.
        queries: ``[B, T, H, N]``, what is read.
    """

    values: Tensor
    steps: Tensor
    decay: Tensor
    keys: Tensor
    queries: Tensor


class Outputs(NamedTuple):
    """What came of a run of tokens.

    Attributes:
        read: ``[B, T, H, P]``.
        states: ``[B, S, H, P, N]``: after every token, or after the last one alone.
    """

    read: Tensor
    states: Tensor


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each channel with its own taps, then apply silu.

    Args:
        inputs: ``[B, K - 1 + T, C]``: the inputs before the first token, then the tokens'.
        weight: ``[C, 1, K]``.
        bias: ``[C]`` or None.

    Returns:
        ``[B, T, C]``.
    """
    return F.silu(F.conv1d(inputs.mT, weight, bias, groups=weight.shape[0])).mT


def recur(inputs: Inputs, state: Tensor) -> Outputs:
    """Run token by token from ``state`` [B, H, P, N], keeping every state."""
    states, reads = [], []
    for token in range(inputs.values.shape[1]):
        step = inputs.steps[:, token]
        kept = torch.exp(step * inputs.decay)[..., None, None] * state
        gained = (step[..., None] * inputs.values[:, token])[..., None]
        state = kept + gained * inputs.keys[:, token, :, None, :]
        states.append(state)
        reads.append(torch.einsum("bhpn,bhn->bhp", state, inputs.queries[:, token]))
    return Outputs(torch.stack(reads, dim=1), torch.stack(states, dim=1))


def recur_in_chunk(inputs: Inputs, state: Tensor) -> Outputs:
    """Run all tokens at once from ``state`` [B, H, P, N], as one product of matrices.

    Its cost grows with the square of the tokens: it is meant for chunks.
    """
    decays = (inputs.steps * inputs.decay).cumsum(dim=1)
    spans = decays[:, :, None, :] - decays[:, None, :, :]
    num_tokens = decays.shape[1]
    past = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=spans.device).tril()
    kept = torch.exp(spans.masked_fill(~past[None, :, :, None], -torch.inf))
    stored = inputs.steps[..., None] * inputs.values
    matches = torch.einsum("bthn,bshn->btsh", inputs.queries, inputs.keys)
    read = torch.einsum("btsh,bshp->bthp", matches * kept, stored)
    from_state = torch.einsum("bthn,bhpn->bthp", inputs.queries, state)
    read = read + torch.exp(decays)[..., None] * from_state
    to_end = torch.exp(decays[:, -1:] - decays)
    gained = torch.einsum("bthp,bthn->bhpn", stored * to_end[..., None], inputs.keys)
    last = torch.exp(decays[:, -1])[..., None, None] * state + gained
    return Outputs(read, last[:, None])
