"""Scenarios in which a soak's steps are cheap."""

from __future__ import annotations

from dataclasses import replace

from tests.soak.scenario import Scenario, every_kind

from bt_width import ContextParallel


def shortened(scenario: Scenario) -> Scenario:
    """Return a scenario in which few requests are served, none for long."""
    limits = replace(scenario.limits, max_model_len=60, max_num_reqs=4, max_num_batched_tokens=24)
    return replace(scenario, limits=limits, spare=0.4)


def small() -> Scenario:
    """Return one rank with tokens, a window and a state."""
    scenario = shortened(every_kind())
    kept = ("latent", "window", "state")
    return replace(
        scenario,
        groups=tuple(group for group in scenario.groups if group.name in kept),
        limits=replace(scenario.limits, context_parallel=ContextParallel()),
    )
