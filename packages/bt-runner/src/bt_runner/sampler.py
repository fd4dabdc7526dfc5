"""Chooses tokens from logits: greedy, or drawn with noise that belongs to a seed and a position.

The noise is computed where the logits are, from numbers alone, so that neither the batch nor
a preemption nor a draft nor the device changes what is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2**64 / the golden ratio, as int64
_FIRST = -0x40A7B892E31B1A47  # the multipliers of splitmix64, as int64
_SECOND = -0x6B2FB644ECCEEE15
_MANTISSA = 53


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the S tokens of a step are chosen; on the device.

    Attributes:
        indices: ``[S]`` int64; the tokens of the batch after which one is chosen.
        rows: ``[S]`` int64; the row of each one's request.
        positions: ``[S]`` int64; the position that each chosen token will have.
        temperatures: ``[S]`` float64, 0 for greedy; empty where all are greedy.
        seeds: ``[S]`` int64; empty where all are greedy.
        is_greedy: Whether all are.
    """

    indices: Tensor
    rows: Tensor
    positions: Tensor
    temperatures: Tensor
    seeds: Tensor
    is_greedy: bool


class Sampler:
    """Chooses one token per row of logits."""

    def __call__(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """Return ``[S]`` int64 for ``logits`` [S, vocab], without a read of the device."""
        if sampling.is_greedy:
            return logits.argmax(dim=-1)
        is_drawn = (sampling.temperatures > 0)[:, None]
        noise = gumbel_noise(sampling.seeds, sampling.positions, logits.shape[1])
        temperatures = torch.where(is_drawn, sampling.temperatures[:, None], 1.0)
        wide = logits.double() / temperatures
        return torch.where(is_drawn, wide + noise, wide).argmax(dim=-1)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return Gumbel noise ``[S, vocab]`` float64: logits plus it have a draw as their argmax.

    Args:
        seeds: ``[S]`` int64.
        positions: ``[S]`` int64.
        vocab_size: Tokens to choose from.
    """
    streams = _mixed(_mixed(seeds) + positions * _GOLDEN)
    tokens = torch.arange(1, vocab_size + 1, device=seeds.device)
    bits = _mixed(streams[:, None] + tokens * _GOLDEN)
    # the middle of one of 2^53 steps between 0 and 1, so never 0 nor 1
    uniform = (_shifted(bits, 64 - _MANTISSA).double() + 0.5) * 2.0**-_MANTISSA
    return -(-uniform.log()).log()


def _mixed(bits: Tensor) -> Tensor:
    """Return 64 bits that each depend on all of ``bits``, as splitmix64 does."""
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift right without the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
