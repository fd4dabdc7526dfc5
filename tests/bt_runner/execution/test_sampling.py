"""Logits to tokens, and which of a step's tokens are kept."""

import pytest
import torch

from bt_runner.execution.sampling import choose_tokens, plan_draws, verify_drafts
from bt_runner.scheduling.request import SamplingParams

GREEDY = SamplingParams()


def _choose(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    draws = plan_draws(params, positions, logits.shape[1], logits.device)
    chosen: list[int] = choose_tokens(logits, draws).tolist()
    return chosen


def test_greedy_takes_the_largest_logit() -> None:
    """Row by row."""
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 2.0]])
    assert _choose(logits, [GREEDY, GREEDY], [5, 9]) == [1, 0]


def test_nothing_to_choose_gives_nothing() -> None:
    """A step may be all in the midst of prompts."""
    assert _choose(torch.zeros(0, 3), [], []) == []


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


def test_draws_follow_the_softmax() -> None:
    """Logits 0, log 3 and log 6 are drawn 1:3:6, at half the temperature 1:9:36.

    Three of them: the noise of two is the same whichever sign it has.
    """
    logits = torch.tensor([1.0, 3.0, 6.0]).log().expand(4000, -1)
    positions = list(range(4000))
    for temperature, weights in ((1.0, (1, 3, 6)), (0.5, (1, 9, 36))):
        params = [SamplingParams(temperature=temperature, seed=1)] * 4000
        drawn = _choose(logits, params, positions)
        for token, weight in enumerate(weights):
            share = weight / sum(weights)
            assert drawn.count(token) / 4000 == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    ("drafts", "chosen", "kept"),
    [
        pytest.param([], [], [], id="midst-of-a-prompt"),
        pytest.param([], [4], [4], id="no-drafts"),
        pytest.param([4, 5], [4, 5, 6], [4, 5, 6], id="all-agree"),
        pytest.param([4, 5], [4, 7, 6], [4, 7], id="second-differs"),
        pytest.param([4, 5], [8, 5, 6], [8], id="first-differs"),
    ],
)
def test_drafts_are_kept_up_to_the_first_that_differs(
    drafts: list[int], chosen: list[int], kept: list[int]
) -> None:
    """What the model chose in its place is kept too; what follows was computed in vain."""
    assert verify_drafts(drafts, chosen) == kept
