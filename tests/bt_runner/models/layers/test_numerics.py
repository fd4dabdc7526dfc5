"""Frequencies by hand; against transformers they are compared with the whole models."""

from __future__ import annotations

import math

import pytest

from bt_runner.models.layers.numerics import Rope, Yarn


def test_plain_frequencies_fall_from_one() -> None:
    """Pair ``i`` turns by ``theta^(-2i / dim)`` per position."""
    assert Rope(dim=4, theta=100.0).inverse_frequencies() == pytest.approx((1.0, 0.1))


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    """The first pairs keep their angle, the last turn ``factor`` times slower."""
    yarn = Yarn(factor=40.0, original_max_positions=4096)
    plain = Rope(dim=64).inverse_frequencies()

    stretched = Rope(dim=64, yarn=yarn).inverse_frequencies()

    assert stretched[:10] == plain[:10]
    assert stretched[-8:] == pytest.approx([angle / 40 for angle in plain[-8:]])
    assert all(slow <= fast for slow, fast in zip(stretched, plain, strict=True))


def test_published_softmax_scale() -> None:
    """DeepSeek-V3.2 scales its softmax by 0.135234: 192 dimensions, stretched 40 times."""
    yarn = Yarn(factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    rope = Rope(dim=64, yarn=yarn)

    assert 192**-0.5 * rope.softmax_scale == pytest.approx(0.135234, abs=1e-6)
    assert rope.rotation_scale == 1.0


def test_yarn_without_mscale_scales_the_rotation() -> None:
    """Without the two numbers, cosine and sine grow with the factor and the softmax does not."""
    rope = Rope(dim=8, yarn=Yarn(factor=8.0, original_max_positions=64))

    assert rope.rotation_scale == pytest.approx(0.1 * math.log(8.0) + 1)
    assert rope.softmax_scale == 1.0


def test_factor_of_one_stretches_nothing() -> None:
    """A context that did not grow leaves every number as it was."""
    rope = Rope(dim=8, yarn=Yarn(factor=1.0, original_max_positions=64, mscale_all_dim=1.0))

    assert rope.inverse_frequencies() == pytest.approx(Rope(dim=8).inverse_frequencies())
    assert (rope.rotation_scale, rope.softmax_scale) == (1.0, 1.0)
