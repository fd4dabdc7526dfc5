"""Requests share blocks of equal beginnings, and no token depends on it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.bt_runner import prefix_scenarios as scenarios

from bt_runner.block_pool import BlockPool
from bt_runner.errors import RunnerError
from bt_runner.kv_cache_manager import KVCacheManager
from bt_runner.prefix_cache import (
    PrefixCache,
    PrefixHashes,
    TokenHashes,
    _Group,
)
from bt_runner.scheduler import Scheduler, SchedulerOutput

NUM_SHORT, NUM_LONG = 30, 1_000


def _run_twice(seed: int) -> None:
    """Run a scenario with and without caching; every step and all tokens are checked in both."""
    scenario = scenarios.random_scenario(seed)
    scenarios.run(scenario)
    plain = scenarios.run(dataclasses.replace(scenario, prefix_caching=False))
    assert (plain.hit_tokens, plain.rehit_tokens) == (0, 0)


@pytest.mark.parametrize("seed", range(NUM_SHORT))
def test_a_step_reads_what_its_own_tokens_made(seed: int) -> None:
    """Groups of all kinds, small pools, preemption, drafts, steps ahead, aborts, failed steps."""
    _run_twice(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_SHORT, NUM_LONG))
def test_a_step_reads_what_its_own_tokens_made_long(seed: int) -> None:
    """The same, 1,000 times in all."""
    _run_twice(seed)


def test_the_scenarios_hit_preempt_and_hit_again() -> None:
    """A scenario in which nothing happens would prove nothing."""
    results = [scenarios.run(scenarios.random_scenario(seed)) for seed in range(20)]
    assert sum(result.hit_tokens > 0 for result in results) > 10
    assert sum(result.rehit_tokens for result in results) > 0
    assert sum(result.num_preemptions for result in results) > 20


def _state_too_early(patch: pytest.MonkeyPatch) -> None:
    """The state at a boundary is taken for the one at the next."""
    find = _Group.find

    def earlier(self: _Group, hashes: PrefixHashes, block: int) -> int | None:
        return find(self, hashes, block - 1 if self.keeps_states and block else block)

    patch.setattr(_Group, "find", earlier)


def _state_in_the_middle(patch: pytest.MonkeyPatch) -> None:
    """The state at a chunk's end is offered as if the chunk had ended with the block."""
    keep = KVCacheManager.keep

    def next_block(
        self: KVCacheManager, rows: Any, num_computed: Any, table: Any, is_prefilling: Any
    ) -> None:
        if all(group.layout.kind == "mamba" for group in self.groups):
            unit = self.prefixes.unit
            rounded = -(-num_computed // unit) * unit
            num_computed = np.where(is_prefilling, rounded, num_computed)
        keep(self, rows, num_computed, table, is_prefilling)

    patch.setattr(KVCacheManager, "keep", next_block)


def _block_of_a_window_gone(patch: pytest.MonkeyPatch) -> None:
    """A hit does not look at the first block of a window."""
    needed = _Group._needed

    def too_few(self: _Group, num_tokens: int) -> range:
        blocks = needed(self, num_tokens)
        return blocks if self.needs_all or self.keeps_states else blocks[1:]

    patch.setattr(_Group, "_needed", too_few)


def _groups_disagree(patch: pytest.MonkeyPatch) -> None:
    """What the first group has is taken for what all have."""

    def longest(self: PrefixCache, hashes: PrefixHashes, max_tokens: int) -> int:
        found = min(max_tokens, hashes.num_hashed)
        return self._groups[0].longest(hashes, found - found % self.unit, self.unit)

    patch.setattr(PrefixCache, "longest", longest)


def _reference_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A request that hits does not count as a holder of the blocks."""
    patch.setattr(BlockPool, "acquire", lambda self, block_ids: None)


def _hash_without_its_parent(patch: pytest.MonkeyPatch) -> None:
    """A block is found by its own tokens alone."""

    def add(self: TokenHashes, tokens: memoryview) -> None:
        self._hashes.append(hashlib.sha256(tokens).digest())
        self.num_hashed += self._step

    patch.setattr(TokenHashes, "add", add)


def _rejected_drafts_cached(patch: pytest.MonkeyPatch) -> None:
    """Blocks are offered with the drafts in them, before it is known which are right."""
    launched = Scheduler.launched

    def with_drafts(self: Scheduler, batch: SchedulerOutput, step: int) -> None:
        launched(self, batch, step)
        for row, end in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True):
            tokens = self.table.read(np.full(end, row), np.arange(end))
            hashes, step = self.kv.prefixes.hashes(), self.kv.prefixes.step
            hashes.extend(tokens)
            tables = [group.block_ids for group in self.kv.groups]
            for boundary in range(step, end + 1, step):
                self.kv.prefixes.keep(hashes, boundary, row, tables, has_state=True)

    patch.setattr(Scheduler, "launched", with_drafts)


def _token_not_computed_cached(patch: pytest.MonkeyPatch) -> None:
    """A block is offered when its last token is known, and not yet computed."""
    keep = KVCacheManager.keep

    def one_more(self: KVCacheManager, rows: Any, num_computed: Any, *others: Any) -> None:
        keep(self, rows, num_computed + 1, *others)

    patch.setattr(KVCacheManager, "keep", one_more)


def _hashes_survive_a_failed_step(patch: pytest.MonkeyPatch) -> None:
    """What a failed step should have computed can still be found."""
    recount = BlockPool.recount

    def forgetful(self: BlockPool, references: Any, *, last_step: int) -> None:
        kept = self._hash_of, self._block_of, self._is_findable.copy()
        recount(self, references, last_step=last_step)
        self._hash_of, self._block_of, self._is_findable = kept

    patch.setattr(BlockPool, "recount", forgetful)


@pytest.mark.parametrize(
    "plant",
    [
        _state_too_early,
        _state_in_the_middle,
        _block_of_a_window_gone,
        _groups_disagree,
        _reference_not_counted,
        _hash_without_its_parent,
        _rejected_drafts_cached,
        _token_not_computed_cached,
        _hashes_survive_a_failed_step,
    ],
)
@pytest.mark.usefixtures("loses_blocks")
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scenarios above see each of them, within the seeds that run every time."""
    plant(monkeypatch)

    def run_all() -> None:
        for seed in range(NUM_SHORT):
            scenarios.run(scenarios.random_scenario(seed))

    with pytest.raises((AssertionError, RunnerError, KeyError, IndexError)):
        run_all()
