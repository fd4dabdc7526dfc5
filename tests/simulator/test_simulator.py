"""The simulator finds nothing in a sound loop, whatever is served, and everything happens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict

import pytest
from tests.simulator.counts import Counts
from tests.simulator.names_engine import simulate_names
from tests.simulator.names_runs import CPU, counts_of, run_names
from tests.simulator.scenario import EVERY_KIND, SHARED_KINDS, SMALL, draw_scenario, of_kinds

NUM_SHORT, NUM_LONG = 16, 1_000


@pytest.mark.parametrize("kinds", [EVERY_KIND, SHARED_KINDS], ids=["every kind", "shared blocks"])
def test_everything_at_once_is_sound_and_happens(
    kinds: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.simulator.ranks_runner.BROKEN", 0.02)
    monkeypatch.setattr("tests.simulator.simulator.DISTURBED", 0.4)
    counts = Counts()
    simulator = simulate_names(of_kinds(kinds, SMALL), CPU, random.Random(0), counts)
    never = {"num_scenarios", "num_findings", "num_lost_blocks"}
    if kinds == EVERY_KIND:
        # a ring keeps nothing of a prefix
        never |= {"num_hit_tokens", "num_rehit_tokens"}

    for _ in range(60):
        simulator.run(5)
        if never == {name for name, count in asdict(counts).items() if not count}:
            break
    simulator.drain()

    assert never == {name for name, count in asdict(counts).items() if not count}
    assert counts.num_checks == counts.num_steps * 4  # two ranks, two classes


@pytest.mark.parametrize("seed", range(3))
def test_a_drawn_scenario_is_sound(seed: int) -> None:
    counts, draw = Counts(), random.Random(seed)

    simulate_names(draw_scenario(draw, SMALL), CPU, draw, counts).serve(5)

    assert counts.num_steps >= 5
    assert counts.num_ended > 0


@pytest.mark.parametrize("seed", range(NUM_SHORT))
def test_a_step_reads_what_its_own_tokens_made(seed: int) -> None:
    """Groups of all kinds, small pools, preemption, drafts, steps ahead, aborts, failed steps."""
    assert counts_of(seed).num_ended > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_SHORT, NUM_LONG))
def test_a_step_reads_what_its_own_tokens_made_long(seed: int) -> None:
    """The same, 1,000 times in all."""
    run_names(seed)


def test_requests_hit_preempt_and_hit_again() -> None:
    """A scenario in which nothing happens would prove nothing."""
    counts = [counts_of(seed) for seed in range(NUM_SHORT)]

    assert sum(each.num_hit_tokens > 0 for each in counts) >= 8
    assert sum(each.num_rehit_tokens for each in counts) > 0
    assert sum(each.num_preemptions for each in counts) > 20


def test_a_loop_that_fails_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulator.ranks_runner.BROKEN", 0.1)
    counts = Counts()
    scenario = of_kinds(("latent", "window", "states"), SMALL, num_ranks=1)
    simulator = simulate_names(scenario, CPU, random.Random(0), counts)

    simulator.run(40)
    monkeypatch.setattr("tests.simulator.ranks_runner.BROKEN", 0.0)
    simulator.drain()

    assert counts.num_broken_steps > 5
