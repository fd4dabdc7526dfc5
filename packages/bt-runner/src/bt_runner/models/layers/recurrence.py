"""Mamba2's recurrence: a causal convolution and a decaying state; it knows no cache.

B lines of L tokens; G groups of H heads of P channels with N numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bt_runner.models.layers.numerics import widened


class Inputs(NamedTuple):
    """What drives the state, token by token.

    A token with a step of 0 leaves the state as it is: that is how lines are padded.

    Attributes:
        values: ``[B, L, G, H, P]``.
        steps: ``[B, L, G, H]``, how much of a value enters and how fast the state decays.
        keys: ``[B, L, G, N]``, where a value is stored.
        queries: ``[B, L, G, N]``, what is read.
        decay: ``[G, H]``, negative.
    """

    values: Tensor
    steps: Tensor
    keys: Tensor
    queries: Tensor
    decay: Tensor


class Outputs(NamedTuple):
    """What came of lines of tokens.

    Attributes:
        read: ``[B, L, G, H, P]``.
        states: ``[B, L, G, H, P, N]``, after every token; of a scan ``[B, G, H, P, N]``, after
            every line.
    """

    read: Tensor
    states: Tensor


def convolve(lines: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each channel with its own taps along each line, then apply silu.

    Args:
        lines: ``[B, K - 1 + L, C]``.
        taps: ``[K, C]``, at least float32.
        bias: ``[C]`` or None.

    Returns:
        ``[B, L, C]``.
    """
    # torch's own convolution is slow where each channel stands alone
    wide, last = widened(lines), len(taps) - 1
    num_tokens = wide.shape[1] - last
    if num_tokens == 1:
        sums = (wide * taps).sum(dim=1, keepdim=True)
    else:
        sums = wide[:, last:] * taps[last]
        for tap in range(last):
            sums.addcmul_(wide[:, tap : tap + num_tokens], taps[tap])
    if bias is not None:
        sums += bias
    return F.silu(sums, inplace=True).to(lines.dtype)


def recur(inputs: Inputs, state: Tensor) -> Outputs:
    """Run token by token from ``state`` [B, G, H, P, N], and keep every state."""
    states, reads = [], []
    for token in range(inputs.values.shape[1]):
        step = inputs.steps[:, token]
        kept = torch.exp(step * inputs.decay)[..., None, None] * state
        gained = (step[..., None] * inputs.values[:, token])[..., None]
        # a state is large: each pass over it counts
        state = kept.addcmul_(gained, inputs.keys[:, token, :, None, None])
        states.append(state)
        # by far faster than as many products of a matrix and a vector
        reads.append((state * inputs.queries[:, token, :, None, None]).sum(dim=-1))
    if len(states) == 1:
        return Outputs(reads[0][:, None], states[0][:, None])
    return Outputs(torch.stack(reads, dim=1), torch.stack(states, dim=1))


def scan(
    inputs: Inputs, starts: Tensor, is_first: Tensor, before_all: Tensor | None = None
) -> Outputs:
    """Run lines that may follow on each other, all tokens of a line at once.

    Args:
        inputs: The lines.
        starts: ``[B, G, H, P, N]``, the state that each line's request began with.
        is_first: ``[B]`` bool, whether a line is its request's first; any other goes on
            from the line before it.
        before_all: ``[G, H, P, N]``, the state after the line before the first of these, which
            may go on from it.
    """
    decays = (inputs.steps * inputs.decay).cumsum(dim=1)
    stored = inputs.steps[..., None] * inputs.values
    kept = torch.exp(decays[:, -1])[..., None, None]
    to_end = torch.exp(decays[:, -1:] - decays)
    gained = torch.einsum("blghp,blgn->bghpn", stored * to_end[..., None], inputs.keys)
    state = torch.zeros_like(starts[0]) if before_all is None else before_all
    before, after = [], []
    for line in range(len(starts)):
        state = torch.where(is_first[line], starts[line], state)
        before.append(state)
        state = kept[line] * state + gained[line]
        after.append(state)
    read = _read_within(inputs, decays, stored)
    from_state = torch.einsum("blgn,bghpn->blghp", inputs.queries, torch.stack(before))
    return Outputs(read + torch.exp(decays)[..., None] * from_state, torch.stack(after))


def _read_within(inputs: Inputs, decays: Tensor, stored: Tensor) -> Tensor:
    """Return what each token reads of those before it in its own line."""
    spans = decays[:, :, None, :] - decays[:, None, :, :]
    num_tokens = decays.shape[1]
    past = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=spans.device).tril()
    kept = torch.exp(spans.masked_fill(~past[None, :, :, None, None], -torch.inf))
    matches = torch.einsum("blgn,bsgn->blsg", inputs.queries, inputs.keys)
    return torch.einsum("blsgh,bsghp->blghp", matches[..., None] * kept, stored)
