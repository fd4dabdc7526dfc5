"""Logits to tokens: greedy, or drawn with noise of a seed and a position."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bt_runner.requests import SamplingParams
from bt_runner.sampler import Sampler, Sampling, gumbel_noise

GREEDY = SamplingParams()


def _choose(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: list[int]
) -> list[int]:
    count = len(positions)
    sampling = Sampling(
        indices=torch.arange(count),
        rows=torch.arange(count),
        positions=torch.tensor(positions, dtype=torch.int64),
        temperatures=torch.tensor([each.temperature for each in params], dtype=torch.float64),
        seeds=torch.tensor([each.seed for each in params], dtype=torch.int64),
        is_greedy=all(each.temperature == 0 for each in params),
    )
    chosen: list[int] = Sampler()(logits, sampling).tolist()
    return chosen


def test_greedy_takes_the_largest_logit() -> None:
    """Row by row."""
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 2.0]])
    assert _choose(logits, [GREEDY, GREEDY], [5, 9]) == [1, 0]


def test_nothing_to_choose_gives_nothing() -> None:
    """A step may be all in the midst of prompts."""
    assert _choose(torch.zeros(0, 3), [], []) == []


def test_a_greedy_row_among_drawn_ones_stays_greedy() -> None:
    """Also where two logits differ by less than float32 sees next to noise."""
    logits = torch.tensor([[0.0, 1e-300], [0.0, 0.0]], dtype=torch.float64)
    warm = SamplingParams(temperature=1.0)
    assert _choose(logits, [GREEDY, warm], [0, 0])[0] == 1


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    """Neither the place in the batch nor the neighbours matter."""
    logits = torch.zeros(1, 1000)
    warm = SamplingParams(temperature=1.0, seed=3)
    alone = _choose(logits, [warm], [7])
    together = _choose(logits.expand(3, -1), [GREEDY, warm, warm], [7, 7, 8])
    assert together[0] == 0
    assert together[1] == alone[0]
    assert together[2] != alone[0]
    assert _choose(logits, [SamplingParams(temperature=1.0, seed=4)], [7]) != alone


@pytest.mark.parametrize("seeds", ["positions", "seeds"])
def test_draws_follow_the_softmax(seeds: str) -> None:
    """Logits 0, log 3 and log 6 are drawn 1:3:6, at half the temperature 1:9:36.

    Three of them: the noise of two is the same whichever sign it has.
    """
    logits = torch.tensor([1.0, 3.0, 6.0]).log().expand(4000, -1)
    numbers = list(range(4000))
    for temperature, weights in ((1.0, (1, 3, 6)), (0.5, (1, 9, 36))):
        is_position = seeds == "positions"
        params = [
            SamplingParams(temperature=temperature, seed=1 if is_position else seed)
            for seed in numbers
        ]
        drawn = _choose(logits, params, numbers if is_position else [5] * 4000)
        for token, weight in enumerate(weights):
            share = weight / sum(weights)
            assert drawn.count(token) / 4000 == pytest.approx(share, abs=0.02)


def test_noise_has_the_mean_and_the_spread_of_its_law() -> None:
    """Euler's constant and pi / sqrt(6), finite everywhere, no value twice."""
    noise = gumbel_noise(torch.arange(50), torch.arange(50), 2000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.std().item() == pytest.approx(1.2825, abs=0.01)
    assert len(set(noise.flatten().tolist())) == noise.numel()
    rows = torch.corrcoef(noise)
    assert (rows - torch.eye(50)).abs().max() < 0.15
