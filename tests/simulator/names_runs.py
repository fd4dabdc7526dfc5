"""Scenarios of names alone: so cheap that tests can run many of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from tests.simulator.counts import Counts
from tests.simulator.names_engine import simulate_names
from tests.simulator.scenario import SMALL, draw_scenario

NUM_REQUESTS = 20
CPU = torch.device("cpu")


def run_names(seed: int, kinds: Sequence[str] = ()) -> Counts:
    """Serve the requests of one scenario, and check each step's names.

    Args:
        seed: Of all that is drawn.
        kinds: The groups, which share blocks; drawn where there are none.
    """
    draw, counts = random.Random(seed), Counts()
    scenario = draw_scenario(draw, SMALL, kinds)
    serving = scenario.serving
    if kinds:
        serving = replace(serving, prefix_caching=True)
    scenario = replace(scenario, serving=serving, is_checked=False)
    simulate_names(scenario, CPU, draw, counts).serve(NUM_REQUESTS)
    if not serving.prefix_caching:
        assert (counts.num_hit_tokens, counts.num_rehit_tokens) == (0, 0)
    return counts


@cache
def counts_of(seed: int) -> Counts:
    """Return what a scenario came to; it is run once."""
    return run_names(seed)
