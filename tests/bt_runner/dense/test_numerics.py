"""Norms and the rotary embedding by hand."""

from __future__ import annotations

import math

import pytest
import torch

from bt_runner.dense.numerics import rms_norm, rotate
from bt_runner.models.layers.numerics import Rope


def test_rms_norm_by_hand() -> None:
    """``(3, 4)`` has a mean square of 12.5; the epsilon is added to it."""
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64)

    expected = torch.tensor([3.0 / 5.0, 8.0 / 5.0], dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, weight, 12.5), expected)


@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_turn_as_complex_numbers(interleaved: bool) -> None:
    """Each pair is a complex number times ``e^(i position frequency)``; halves come out apart."""
    rope = Rope(dim=4, theta=100.0, interleaved=interleaved)
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    pairs = (1 + 2j, 3 + 4j) if interleaved else (1 + 3j, 2 + 4j)

    turned = rotate(x, torch.tensor([5]), rope)[0].tolist()

    first, second = (
        pair * complex(math.cos(angle), math.sin(angle))
        for pair, angle in zip(pairs, (5.0, 0.5), strict=True)
    )
    assert turned == pytest.approx([first.real, second.real, first.imag, second.imag])


def test_products_depend_on_the_distance_alone() -> None:
    """A query and a key moved by the same distance have the same product."""
    rope = Rope(dim=8)
    query = torch.arange(1.0, 9.0, dtype=torch.float64)[None]
    key = query.flip(1)

    def product(at: int, distance: int) -> torch.Tensor:
        turned = rotate(query, torch.tensor([at + distance]), rope)
        return (turned * rotate(key, torch.tensor([at]), rope)).sum()

    torch.testing.assert_close(product(0, 7), product(1000, 7))
    assert not torch.allclose(product(0, 7), product(0, 8))
