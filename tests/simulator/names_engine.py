"""The simulator over cache groups of any kind, on all ranks, with a model of names."""

from __future__ import annotations

import random

import torch
from tests.simulator import names
from tests.simulator.counts import Counts
from tests.simulator.names_model import Texts
from tests.simulator.rank import Rank, setup_of
from tests.simulator.ranks_runner import RanksRunner
from tests.simulator.scenario import NamesScenario
from tests.simulator.simulator import Simulator
from tests.simulator.traffic import Drafts, Traffic

from bt_runner.engine import EngineLoop, _OneByOne
from bt_runner.kv_cache_manager import KVCacheManager
from bt_runner.scheduler import Scheduler


def simulate_names(
    scenario: NamesScenario, device: torch.device, draw: random.Random, counts: Counts
) -> Simulator:
    """Return a simulator that has not begun."""
    serving = scenario.serving
    limits = serving.limits
    setups = [setup_of(scenario, rank, device) for rank in range(limits.context_parallel.size)]
    layouts = setups[0].layouts
    kv = KVCacheManager(
        layouts,
        serving.num_blocks(layouts),
        prefix_caching=serving.prefix_caching,
        names=scenario.names,
    )
    texts = Texts(limits.max_num_reqs)
    ranks = [Rank(scenario, setup, kv, texts, device, draw) for setup in setups]
    traffic = Traffic(serving, names.VOCAB, names.answer, draw)
    max_drafts = limits.num_speculative_tokens
    loop = EngineLoop(
        RanksRunner(ranks, draw, counts),
        Scheduler(limits, kv),
        _OneByOne(Drafts(serving, traffic, names.VOCAB, draw), max_drafts, names.VOCAB)
        if max_drafts
        else None,
        serving.max_steps_in_flight,
    )
    return Simulator(loop, traffic, draw, counts)
