"""Drawn scenarios: all of them can be planned, and every kind of group is drawn."""

from __future__ import annotations

import random

import pytest
import torch
from tests.soak.rank import setup_of
from tests.soak.scenario import draw_scenario, every_kind

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(25))
def test_a_drawn_scenario_can_be_planned_on_every_rank(seed: int) -> None:
    scenario = draw_scenario(random.Random(seed))

    setups = [
        setup_of(scenario, rank, CPU) for rank in range(scenario.limits.context_parallel.size)
    ]

    for setup in setups[1:]:
        digests = [layout.digest() for layout in setup.layouts]
        assert digests == [layout.digest() for layout in setups[0].layouts]


def test_a_pool_holds_the_longest_request() -> None:
    for seed in range(25):
        scenario = draw_scenario(random.Random(seed))
        layouts = setup_of(scenario, 0, CPU).layouts
        for layout, size in zip(layouts, scenario.num_blocks(layouts), strict=True):
            assert size > layout.max_resident_blocks(scenario.limits.max_num_batched_tokens)


def test_everything_is_served_at_once() -> None:
    layouts = setup_of(every_kind(), 0, CPU).layouts

    assert {layout.kind for layout in layouts} == {"attention", "window", "ring", "mamba"}
    assert {layout.slot_mode for layout in layouts} == {"block", "ring", "none"}
    assert {layout.shards for layout in layouts} == {1, 2}
    assert any(layout.kernel_blocks_per_block > 1 for layout in layouts)


def test_equal_seeds_draw_equal_scenarios() -> None:
    first, second = (draw_scenario(random.Random("7")) for _ in range(2))

    assert first == second
