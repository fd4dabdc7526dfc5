"""The choice of tokens: the highest scores, the earlier of equal ones, and never the future."""

from __future__ import annotations

import pytest
import torch
from tests.bt_runner.harness import dense_hybrid

from bt_runner.dense.selection import Choice, highest


def _naive(row: list[float], topk: int) -> set[int]:
    return set(sorted(range(len(row)), key=lambda at: (-row[at], at))[:topk])


@pytest.mark.parametrize("topk", [1, 2, 7, 8, 9])
def test_highest_equals_sorting(topk: int) -> None:
    """Scores drawn from few values, so that most of them tie, are chosen as by a stable sort."""
    generator = torch.Generator().manual_seed(topk)
    scores = torch.randint(-2, 3, (64, 8), generator=generator).double()
    scores[scores == 2] = float("-inf")

    chosen = highest(scores, topk)

    for row in range(len(scores)):
        assert set(chosen[row].nonzero().flatten().tolist()) == _naive(scores[row].tolist(), topk)


def test_equal_scores_choose_the_earlier_token() -> None:
    """Where all scores are the same, the first tokens are chosen; -0.0 is equal to 0.0."""
    scores = torch.tensor([[0.0, -0.0, 0.0, -0.0, 0.0]])

    assert highest(scores, 3).tolist() == [[True, True, True, False, False]]


def test_future_is_never_chosen() -> None:
    """A query that sees fewer tokens than a choice holds sees those and no more."""
    model = dense_hybrid()

    choice = model.forward(list(range(100)), model.new_cache()).choices[1]

    assert choice is not None
    assert not choice.chosen.triu(1).any()
    assert choice.chosen.sum(dim=1).tolist() == [min(row + 1, 64) for row in range(100)]
    assert choice.chosen[2].nonzero().flatten().tolist() == [0, 1, 2]


def test_gaps_are_between_the_lowest_chosen_and_the_highest_other() -> None:
    """A query that sees all it may has no gap that rounding could close."""
    scores = torch.tensor([[5.0, -torch.inf, -torch.inf], [1.0, 4.0, 1.5]])
    chosen = torch.tensor([[True, False, False], [False, True, True]])

    assert Choice(scores, chosen, 2).gaps().tolist() == [float("inf"), 0.5]
