"""Any scenario: pools that run short, splits, ranks, drafts, states, shared beginnings."""

from __future__ import annotations

import random

import pytest
from tests.support.model_configs import falcon_h1, glm_5_2, nemotron_h_8b
from tests.support.replays import CutOptions, ReplayCase, drive, own_trace

CI_SEEDS = range(6)
LONG_SEEDS = range(6, 206)


def _random_case(draw: random.Random) -> ReplayCase:
    block_size = draw.choice([16, 32, 64, 96, 128])
    num_drafts = draw.choice([0, 1, 3])
    longest = 6 * 512 + 60
    size = draw.choice([1, 2, 3])
    return ReplayCase(
        config=draw.choice([glm_5_2, glm_5_2, nemotron_h_8b, falcon_h1])(),
        options=CutOptions(
            block_size=block_size,
            kernel_block_size=draw.choice([None, block_size // 2, 16]),
            mamba_mode=draw.choice(["none", "align"]),
            mamba_block_size=draw.choice([None, 48]),
        ),
        max_model_len=draw.choice([longest, 8192, 100_000]),
        size=size,
        interleave=draw.choice([1, 4, 16]),
        num_drafts=num_drafts,
        num_blocks=draw.choice([None, 3 + num_drafts + -(-longest // (block_size * size))]),
    )


def _serve(seed: int) -> None:
    draw = random.Random(seed)
    case, trace = _random_case(draw), own_trace(12, seed)
    replay = case.make(trace)

    refused = drive(replay, trace, step_ms=draw.choice([None, 2.0, 50.0]))

    assert refused == []
    assert replay.summary.num_requests == len(trace)
    assert replay.summary.num_output_tokens == sum(request.output_len for request in trace)
    assert replay.summary.num_checked_steps == replay.summary.num_steps


@pytest.mark.parametrize("seed", CI_SEEDS)
def test_in_any_scenario_every_step_agrees(seed: int) -> None:
    _serve(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", LONG_SEEDS)
def test_in_many_scenarios_every_step_agrees(seed: int) -> None:
    _serve(seed)
