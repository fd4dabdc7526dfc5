"""Logits to tokens: greedy, or drawn with noise that belongs to a seed and a position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bt_runner.scheduling.request import SamplingParams
from bt_runner.scheduling.step_plan import Scheduled

# a key of Philox has 128 bits
_NUM_KEYS = 2**128


@dataclass(frozen=True, slots=True)
class Draws:
    """What logits are drawn with, on their device before they are computed.

    Attributes:
        temperatures: ``[S, 1]`` float64; 1 for greedy rows.
        noise: ``[S, vocab]`` float64; 0 for greedy rows.
    """

    temperatures: Tensor
    noise: Tensor


def plan_draws(
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> Draws | None:
    """Return what S tokens are drawn with; None where all are greedy.

    The noise of a draw depends on the request's seed and the token's position alone,
    so that neither the batch nor a preemption nor a draft changes what is drawn.

    Args:
        params: How each token is chosen.
        positions: The position each chosen token will have.
        vocab_size: Tokens to choose from.
        device: Where the logits will be.
    """
    if all(each.temperature == 0 for each in params):
        return None
    temperatures = torch.tensor(
        [each.temperature or 1.0 for each in params], dtype=torch.float64, device=device
    )
    noise = [_noise(vocab_size, *pair) for pair in zip(params, positions, strict=True)]
    return Draws(temperatures[:, None], torch.stack(noise).to(device))


def _noise(vocab_size: int, params: SamplingParams, position: int) -> Tensor:
    """Return Gumbel noise: the argmax of logits plus it is a draw from their softmax."""
    if params.temperature == 0:
        return torch.zeros(vocab_size, dtype=torch.float64)
    # a counter-based generator: any position's noise, without that of the others
    source = np.random.Philox(key=params.seed % _NUM_KEYS, counter=[0, 0, 0, position])
    uniform = np.random.Generator(source).random(vocab_size).clip(min=np.finfo(np.float64).tiny)
    return torch.from_numpy(-np.log(-np.log(uniform)))


def choose_tokens(logits: Tensor, draws: Draws | None) -> Tensor:
    """Choose one token per row of ``logits``, ``[S, vocab]``, without a read of the device.

    Returns:
        ``[S]`` int64.
    """
    if draws is not None:
        logits = logits.double() / draws.temperatures + draws.noise
    return logits.argmax(dim=-1)


def verify_drafts(drafts: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Return the tokens of a step that are kept: agreed drafts, and one chosen after them.

    Args:
        drafts: The guesses.
        chosen: What the model chose after each token computed, one more than ``drafts``;
            none in the midst of a prompt.
    """
    agreed = 0
    while agreed < len(drafts) and drafts[agreed] == chosen[agreed]:
        agreed += 1
    return list(chosen[: agreed + 1])


@dataclass(frozen=True, slots=True)
class Choices:
    """The tokens that a batch's step chooses.

    Attributes:
        rows: ``[S]`` int64, on the device: the tokens of the batch another is chosen after.
        draws: What they are drawn with; None where all are greedy.
    """

    rows: Tensor
    draws: Draws | None


def plan_choices(scheduled: Sequence[Scheduled], vocab_size: int, device: torch.device) -> Choices:
    """Return what a step is to choose, request by request as many as each has choices."""
    rows: list[int] = []
    params: list[SamplingParams] = []
    positions: list[int] = []
    end = 0
    for part in scheduled:
        end += part.num_tokens
        rows += range(end - part.num_choices, end)
        params += [part.request.params] * part.num_choices
        positions += range(part.seq_len - part.num_choices + 1, part.seq_len + 1)
    return Choices(
        torch.tensor(rows, dtype=torch.int64).to(device),
        plan_draws(params, positions, vocab_size, device),
    )


def keep_tokens(scheduled: Sequence[Scheduled], chosen: Sequence[int]) -> list[list[int]]:
    """Return the tokens that each request of a batch keeps, of those its step chose."""
    kept, start = [], 0
    for part in scheduled:
        kept.append(verify_drafts(part.drafts, chosen[start : start + part.num_choices]))
        start += part.num_choices
    return kept
