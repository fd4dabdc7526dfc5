"""Requests served in random ways give what ``generate`` gives, one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.bt_runner.harness import SpoiledDrafter, Traffic
from tests.support.engine_oracle import engine_differences
from tests.support.engine_runs import OPTIONS, Way, serve
from tests.support.hf_models import FAMILIES, Checkpoint, load, prompts
from tests.support.hf_recording import greedy

from bt_runner.models.checkpoint import load_weights, read_config
from bt_width import ServingLimits

NUM_NEW = 12


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> Any:
    """Return a family's float64 model and what it generates, computed once."""

    @cache
    def of(family: str) -> Any:
        model = load(checkpoint(family), torch.float64)
        return model, [greedy(model, token_ids, NUM_NEW) for token_ids in prompts()]

    return of


def _random_way(draw: random.Random) -> Way:
    num_drafts = draw.choice([0, 0, 1, 2, 3, 4, 5])
    max_num_reqs = draw.randint(1, 4)
    # every request that decodes takes a token and its drafts in each step
    smallest = max_num_reqs * (1 + num_drafts)
    block_size = draw.choice([4, 8, 16, 24])
    return Way(
        limits=ServingLimits(
            max_model_len=64,
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=draw.randint(smallest, smallest + 40),
            num_speculative_tokens=num_drafts,
        ),
        options=replace(
            OPTIONS,
            attention_block_size=block_size,
            sparse_block_size=draw.choice([1, 2, 3]) * block_size,
            kernel_block_sizes=(draw.choice([block_size, 4]),),
            mamba_block_size=draw.randint(6, 20),
            mamba_mode=draw.choice(["none", "align"]),
            num_speculative_blocks=num_drafts,
        ),
        # what a request of 52 tokens needs, and a few
        num_blocks=draw.choice([None, 1 + -(-52 // block_size) + draw.randint(0, 4) + num_drafts]),
        late=draw.randint(0, 3),
    )


@pytest.mark.parametrize(
    "seed",
    [
        *range(2),
        *[pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 150)],
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_generate(
    checkpoint: Checkpoint, expected: Any, family: str, seed: int
) -> None:
    """Blocks, chunks, pools, arrivals and drafts drawn from a seed change no token."""
    draw = random.Random(f"{family} {seed}")
    way = _random_way(draw)
    model, tokens = expected(family)
    directory = checkpoint(family)
    config = read_config(directory)
    weights = load_weights(directory, config, dtype=torch.float64)
    texts = Traffic(prompts(), [])
    drafter = SpoiledDrafter(texts, tokens, draw.random(), seed=seed, is_ragged=draw.random() < 0.5)

    has_drafts = way.limits.num_speculative_tokens > 0
    run = serve(
        way.engine(config, weights, drafter if has_drafts else None), prompts(), NUM_NEW, way.late
    )

    assert run.outputs == tokens
    found = engine_differences(run, model)
    assert found.agree(), (way, found)
