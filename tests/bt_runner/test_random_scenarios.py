"""Random traffic through random engines: every token equals the dense reference's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.bt_runner.harness import (
    SpoiledDrafter,
    Traffic,
    decode,
    decode_all_densely,
    greedy_traffic,
    tiny_engine,
    tiny_limits,
    tiny_options,
)

from bt_runner.engine import Engine
from bt_width import MultipleOf

NUM_SHORT, NUM_LONG = 60, 2_000
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 50)


def _traffic(draw: random.Random) -> Traffic:
    lengths = [draw.choice(LENGTHS) for _ in range(draw.randint(1, 6))]
    traffic = greedy_traffic(draw.randrange(1 << 30), lengths, draw.randint(1, 14))
    return replace(traffic, arrivals=[draw.randint(0, 6) for _ in lengths])


def _engine(draw: random.Random, traffic: Traffic, wanted: list[list[int]]) -> Engine:
    num_drafts = draw.choice([0, 0, 1, 2, 3, 4, 5])
    limits = tiny_limits(
        max_num_reqs=draw.randint(1, 5),
        max_num_batched_tokens=draw.choice([num_drafts + 1, 8, 16, 40]),
        num_speculative_tokens=num_drafts,
    )
    attention, sparse = draw.choice([4, 8, 16]), draw.choice([4, 8, 12])
    kernel_sizes = draw.choice([(4,), (2,), (1, 4), (MultipleOf(4),)])
    state_sizes = [size for size in (1, 2, 3, 4, 8, 12, 128) if size > num_drafts]
    options = tiny_options(
        attention_block_size=attention,
        sparse_block_size=sparse,
        kernel_block_sizes=kernel_sizes,
        mamba_block_size=draw.choice(state_sizes),
        mamba_mode=draw.choice(["none", "align"]),
        num_speculative_blocks=num_drafts,
    )
    drafter = None
    if num_drafts:
        acceptance = draw.choice([0.0, 0.5, 0.8, 1.0])
        drafter = SpoiledDrafter(
            traffic, wanted, acceptance, seed=draw.randrange(99), is_ragged=draw.random() < 0.5
        )
    in_flight = draw.choice([1, 2])
    engine = tiny_engine(limits, options, drafter=drafter, max_steps_in_flight=in_flight)
    if draw.random() < 0.5:
        return engine
    longest = max(map(len, traffic.prompts)) + traffic.params[0].max_new_tokens
    num_blocks = [
        1
        + draw.randint(0, 3)
        + min(layout.num_blocks(longest), layout.max_resident_blocks(limits.max_num_batched_tokens))
        for layout in engine.layouts
    ]
    return tiny_engine(
        limits,
        options,
        num_blocks=num_blocks,
        drafter=drafter,
        max_steps_in_flight=in_flight,
    )


def _run(seed: int) -> None:
    draw = random.Random(seed)
    traffic = _traffic(draw)
    wanted = decode_all_densely(traffic)
    assert decode(_engine(draw, traffic, wanted), traffic) == wanted


@pytest.mark.parametrize("seed", range(NUM_SHORT))
def test_a_random_scenario_gives_the_reference_tokens(seed: int) -> None:
    """Lengths, chunks, pools, splits, drafts, modes and arrivals are drawn."""
    _run(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_SHORT, NUM_LONG, 20))
def test_twenty_more_random_scenarios_give_the_reference_tokens(seed: int) -> None:
    """With those above 2,000 in all."""
    for each in range(seed, seed + 20):
        _run(each)
