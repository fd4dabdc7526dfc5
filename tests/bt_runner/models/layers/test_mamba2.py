"""Mamba2's recurrence: token by token, by lines, and over padding."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bt_runner.models.layers.mamba2 import Inputs, convolve, recur, scan

G, H, P, N = 2, 3, 2, 4


def _inputs(num_lines: int, length: int) -> Inputs:
    draw = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_lines, length, *shape, generator=draw, dtype=torch.float64)

    decay = -torch.rand(G, H, generator=draw, dtype=torch.float64) - 0.1
    return Inputs(normal(G, H, P), normal(G, H).abs(), normal(G, N), normal(G, N), decay)


def _state(num_lines: int) -> Tensor:
    draw = torch.Generator().manual_seed(99)
    return torch.randn(num_lines, G, H, P, N, generator=draw, dtype=torch.float64)


def _cut(inputs: Inputs, line: int, start: int, end: int) -> Inputs:
    values, steps, keys, queries = (part[line : line + 1, start:end] for part in inputs[:4])
    return Inputs(values, steps, keys, queries, inputs.decay)


def test_every_state_is_the_decayed_last_one_and_what_entered() -> None:
    """The definition, head by head."""
    inputs, state = _inputs(1, 5), _state(1)
    outputs = recur(inputs, state)
    for head in product(range(G), range(H)):
        now = state[0][head]
        for t in range(5):
            step = inputs.steps[0, t][head]
            entered = step * torch.outer(inputs.values[0, t][head], inputs.keys[0, t, head[0]])
            now = torch.exp(step * inputs.decay[head]) * now + entered
            torch.testing.assert_close(outputs.states[0, t][head], now)
            read = now @ inputs.queries[0, t, head[0]]
            torch.testing.assert_close(outputs.read[0, t][head], read)


@pytest.mark.parametrize("length", [1, 2, 17])
def test_a_line_at_once_equals_token_by_token(length: int) -> None:
    """Its outputs and its last state."""
    inputs, starts = _inputs(3, length), _state(3)
    by_token = recur(inputs, starts)
    by_line = scan(inputs, starts, torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(by_line.read, by_token.read)
    torch.testing.assert_close(by_line.states, by_token.states[:, -1])


def test_a_line_goes_on_from_the_one_before_it() -> None:
    """Two requests in lines of four: the first has two of them."""
    whole = _inputs(2, 8)
    first, second = _cut(whole, 0, 0, 8), _cut(whole, 1, 0, 4)
    starts = _state(2)
    values, steps, keys, queries = (
        torch.cat((a[:, :4], a[:, 4:], b)) for a, b in zip(first[:4], second[:4], strict=True)
    )
    lines = Inputs(values, steps, keys, queries, whole.decay)
    outputs = scan(lines, starts[[0, 0, 1]], torch.tensor([True, False, True]))
    wanted = recur(first, starts[:1]), recur(second, starts[1:])
    torch.testing.assert_close(outputs.read[:2].reshape(8, G, H, P), wanted[0].read[0])
    torch.testing.assert_close(outputs.read[2], wanted[1].read[0])
    torch.testing.assert_close(outputs.states[1], wanted[0].states[0, -1])
    torch.testing.assert_close(outputs.states[2], wanted[1].states[0, -1])


def test_a_step_of_zero_leaves_the_state_alone() -> None:
    """So lines of different lengths are padded."""
    inputs, starts = _inputs(2, 6), _state(2)
    inputs.steps[0, 4:] = 0
    short = recur(_cut(inputs, 0, 0, 4), starts[:1])
    for outputs in (scan(inputs, starts, torch.ones(2, dtype=torch.bool)), recur(inputs, starts)):
        last = outputs.states if outputs.states.dim() == 5 else outputs.states[:, -1]
        torch.testing.assert_close(last[0], short.states[0, -1])


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("has_bias", [True, False])
def test_each_channel_has_its_own_taps(has_bias: bool, length: int) -> None:
    """As torch convolves a line that begins with the earlier inputs."""
    draw = torch.Generator().manual_seed(1)
    lines, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64)
        for shape in ((2, 3 + length, 5), (5, 1, 4), (5,))
    )
    own_bias = bias if has_bias else None
    found = convolve(lines, weight[:, 0].T, own_bias)
    wanted = F.silu(F.conv1d(lines.mT, weight, own_bias, groups=5)).mT
    torch.testing.assert_close(found, wanted)
