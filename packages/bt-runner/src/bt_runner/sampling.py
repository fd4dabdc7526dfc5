"""Logits to tokens: greedy, or drawn with noise that belongs to a seed and a position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bt_runner.request import SamplingParams
from bt_runner.step_plan import Scheduled

_KEYS = 2**128


def choose_tokens(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """Choose one token per row of ``logits``, with one read of the device.

    The noise of a draw depends on the request's seed and the token's position alone,
    so that neither the batch nor a preemption nor a draft changes what is drawn.

    Args:
        logits: ``[S, vocab]``.
        params: How each row is sampled.
        positions: The position each chosen token will have.
    """
    scores = logits
    if any(each.temperature > 0 for each in params):
        temperatures = [each.temperature or 1.0 for each in params]
        noise = [_noise(logits.shape[1], *pair) for pair in zip(params, positions, strict=True)]
        scores = logits.double() / torch.tensor(temperatures, device=logits.device)[:, None]
        scores = scores + torch.stack(noise).to(logits.device)
    chosen: list[int] = scores.argmax(dim=-1).tolist()
    return chosen


def _noise(vocab_size: int, params: SamplingParams, position: int) -> Tensor:
    """Return Gumbel noise: the argmax of logits plus it is a draw from their softmax."""
    if params.temperature <= 0:
        return torch.zeros(vocab_size, dtype=torch.float64)
    # a counter-based generator: any position's noise, without that of the others
    source = np.random.Philox(key=params.seed % _KEYS, counter=[0, 0, 0, position])
    uniform = np.random.Generator(source).random(vocab_size).clip(min=np.finfo(np.float64).tiny)
    return torch.from_numpy(-np.log(-np.log(uniform)))


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


def choice_rows(scheduled: Sequence[Scheduled]) -> Tensor:
    """Return the tokens of a batch that another one is chosen after, ``[S]``, on the host."""
    rows: list[int] = []
    end = 0
    for part in scheduled:
        end += len(part.token_ids)
        rows += range(end - part.num_choices, end)
    return torch.tensor(rows, dtype=torch.int64)


def keep_tokens(scheduled: Sequence[Scheduled], logits: Tensor) -> list[list[int]]:
    """Return the tokens that each request of a batch keeps, for logits at ``choice_rows``."""
    params: list[SamplingParams] = []
    positions: list[int] = []
    for part in scheduled:
        params += [part.request.params] * part.num_choices
        positions += range(part.seq_len - part.num_choices + 1, part.seq_len + 1)
    chosen = choose_tokens(logits, params, positions)
    kept, start = [], 0
    for part in scheduled:
        kept.append(verify_drafts(part.drafts, chosen[start : start + part.num_choices]))
        start += part.num_choices
    return kept
