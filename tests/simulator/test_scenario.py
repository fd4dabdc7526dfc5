"""Drawn scenarios: all of them can be planned, and every kind of group is drawn."""

from __future__ import annotations

import random

import pytest
import torch
from tests.simulator.rank import setup_of
from tests.simulator.scenario import EVERY_KIND, LARGE, SMALL, Scale, draw_scenario, of_kinds

CPU = torch.device("cpu")


@pytest.mark.parametrize("scale", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("seed", range(25))
def test_a_drawn_scenario_can_be_planned_on_every_rank(seed: int, scale: Scale) -> None:
    scenario = draw_scenario(random.Random(seed), scale)

    size = scenario.serving.limits.context_parallel.size
    setups = [setup_of(scenario, rank, CPU) for rank in range(size)]

    for setup in setups[1:]:
        digests = [layout.digest() for layout in setup.layouts]
        assert digests == [layout.digest() for layout in setups[0].layouts]


def test_a_pool_holds_the_longest_request() -> None:
    for seed in range(25):
        scenario = draw_scenario(random.Random(seed), SMALL)
        layouts, serving = setup_of(scenario, 0, CPU).layouts, scenario.serving
        for layout, size in zip(layouts, serving.num_blocks(layouts), strict=True):
            assert size > layout.max_resident_blocks(serving.limits.max_num_batched_tokens)


def test_everything_is_served_at_once() -> None:
    layouts = setup_of(of_kinds(EVERY_KIND, LARGE), 0, CPU).layouts

    assert {layout.kind for layout in layouts} == {"attention", "window", "ring", "mamba"}
    assert {layout.slot_mode for layout in layouts} == {"block", "ring", "none"}
    assert {layout.shards for layout in layouts} == {1, 2}
    assert any(layout.kernel_blocks_per_block > 1 for layout in layouts)


def test_everything_is_drawn() -> None:
    scenarios = [draw_scenario(random.Random(seed), LARGE) for seed in range(60)]

    servings = [scenario.serving for scenario in scenarios]
    assert {name for each in scenarios for name in each.names} == {*EVERY_KIND, "state"}
    assert {each.max_steps_in_flight for each in servings} == {1, 2}
    assert {each.prefix_caching for each in servings} == {False, True}
    assert {each.limits.context_parallel.size for each in servings} == {1, 2, 3}
    assert {each.limits.num_speculative_tokens for each in servings} == {0, 1, 2, 3}


def test_equal_seeds_draw_equal_scenarios() -> None:
    first, second = (draw_scenario(random.Random("7"), LARGE) for _ in range(2))

    assert first == second
