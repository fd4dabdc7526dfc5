"""Faults planted into the loop, its tables and its prefix cache: the simulator finds each."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.simulator.counts import Counts
from tests.simulator.names_engine import simulate_names
from tests.simulator.names_model import NamesModel
from tests.simulator.names_runs import CPU, run_names
from tests.simulator.rank import setup_of
from tests.simulator.scenario import EVERY_KIND, SMALL, of_kinds
from tests.simulator.simulator import Simulator
from tests.simulator.table_checks import TableChecks

from bt_builders import reference
from bt_runner.arrays import Ints
from bt_runner.block_pool import BlockPool
from bt_runner.errors import RunnerError, VerificationError
from bt_runner.input_batch import InputBatch
from bt_runner.kv_cache_manager import GroupBlocks, KVCacheManager
from bt_runner.model_runner import TableGuard
from bt_runner.prefix_cache import (
    PrefixCache,
    PrefixHashes,
    TokenHashes,
    _Group,
)
from bt_runner.requests import Request
from bt_runner.scheduler import Scheduler, SchedulerOutput
from bt_tables import MultiGroupBlockTable, StagedBlockTables, StepTables
from bt_tables.sanitizer import BlockTableFaultError
from bt_width import Addressing

NUM_SEEDS = 20


def _few_kinds(counts: Counts | None = None, spare: float = 0.3) -> Simulator:
    """Return a simulator whose steps are cheap, and checked."""
    scenario = of_kinds(("latent", "window", "states"), SMALL, num_ranks=1)
    scenario = replace(scenario, serving=replace(scenario.serving, spare=spare))
    return simulate_names(scenario, CPU, random.Random(0), counts or Counts())


def test_an_append_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedBlockTables, "stage", lambda *_args, **_kwargs: None)

    with pytest.raises(BlockTableFaultError):
        _few_kinds().run(5)


def test_a_null_prefix_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedBlockTables, "null_prefix", lambda *_args: None)

    with pytest.raises(BlockTableFaultError):
        _few_kinds().run(60)


def test_rows_left_in_the_old_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sanitizer or by the comparison of both classes, whichever comes upon it first."""
    monkeypatch.setattr(MultiGroupBlockTable, "swap_rows", lambda *_args: None)

    with pytest.raises((BlockTableFaultError, VerificationError)):
        _few_kinds().run(150)


def test_two_ranks_that_take_themselves_for_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.simulator.names_engine.setup_of",
        lambda scenario, rank, device: setup_of(scenario, 0, device),
    )
    simulator = simulate_names(of_kinds(EVERY_KIND, SMALL), CPU, random.Random(0), Counts())

    with pytest.raises(VerificationError, match="lies on 2 ranks, not on 1"):
        simulator.run(5)


def test_classes_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards are off, so that only the comparison can see it."""
    monkeypatch.setattr(TableGuard, "check", lambda *_args: None)
    made = StagedBlockTables.step

    def short(self: StagedBlockTables, batch: Any) -> StepTables:
        tables = made(self, batch)
        return StepTables(tables.block_tables, torch.full_like(tables.slot_mappings, -1))

    monkeypatch.setattr(StagedBlockTables, "step", short)

    with pytest.raises(VerificationError, match="slots of the two table classes differ"):
        _few_kinds().run(5)


def test_a_dummy_step_that_names_a_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check = TableChecks.check_dummy

    def named(self: TableChecks, inputs: InputBatch, tables: StepTables) -> None:
        block_tables = tuple(torch.ones_like(table) for table in tables.block_tables)
        check(self, inputs, tables._replace(block_tables=block_tables))

    monkeypatch.setattr(TableChecks, "check_dummy", named)
    monkeypatch.setattr("tests.simulator.simulator.DISTURBED", 0.5)

    with pytest.raises(VerificationError, match="a dummy step's table names a block"):
        _few_kinds().run(150)


@pytest.mark.usefixtures("loses_blocks")
def test_a_block_that_is_not_given_back_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    release = GroupBlocks.release
    lost: list[int] = []

    def lossy(group: GroupBlocks, rows: Ints, last_step: int) -> None:
        if not lost:
            lost.append(1)
            group.num_null[rows[0]] += 1
        release(group, rows, last_step)

    monkeypatch.setattr(GroupBlocks, "release", lossy)
    monkeypatch.setattr("tests.simulator.table_checks.CONTRACT_EVERY", 10_000)
    monkeypatch.setattr("tests.simulator.ranks_runner.BROKEN", 0.0)
    counts = Counts()
    simulator = _few_kinds(counts, spare=1.0)
    simulator.run(20)

    with pytest.raises(VerificationError, match=r"group 0: 1 of \d+ blocks did not come back"):
        simulator.drain()

    assert counts.num_lost_blocks == 1


def _blocks_exchanged(patch: pytest.MonkeyPatch) -> None:
    """A row's first two new blocks stand in each other's place, in the tables alone."""
    stage = StagedBlockTables.stage

    def exchanged(self: StagedBlockTables, rows: Any, counts: Any, ids: Any, **others: Any) -> None:
        if counts[0, 0] > 1:
            ids = ids.copy()
            ids[:2] = ids[:2][::-1]
        stage(self, rows, counts, ids, **others)

    patch.setattr(StagedBlockTables, "stage", exchanged)


def _state_column_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Builders look for a state in the column after its own, once its row has several."""
    columns = reference._state_columns

    def next_column(addressing: Addressing, num_tokens: Any) -> Any:
        found = columns(addressing, num_tokens)
        return np.where(found > 1, found + 1, found)

    patch.setattr(reference, "_state_columns", next_column)


def _abort_keeps_blocks(patch: pytest.MonkeyPatch) -> None:
    """The row of a request that is aborted is given up, and its blocks are not."""
    abort = Scheduler.abort

    def forgetful(self: Scheduler, request: Request, last_step: int) -> None:
        with pytest.MonkeyPatch.context() as kept:
            kept.setattr(KVCacheManager, "release", lambda *_args, **_kwargs: None)
            abort(self, request, last_step)

    patch.setattr(Scheduler, "abort", forgetful)


def _block_shared_too_early(patch: pytest.MonkeyPatch) -> None:
    """A block is offered while its last tokens are still to be written: a step early."""
    keep = KVCacheManager.keep

    def early(
        self: KVCacheManager, rows: Any, num_computed: Any, table: Any, is_prefilling: Any
    ) -> None:
        step = self.prefixes.step
        rounded = np.minimum(-(-num_computed // step) * step, table.num_tokens[rows])
        keep(self, rows, rounded, table, is_prefilling)

    patch.setattr(KVCacheManager, "keep", early)


def _draft_states_not_committed(patch: pytest.MonkeyPatch) -> None:
    """The states of accepted drafts stay where they were computed."""
    patch.setattr(NamesModel, "copy_blocks", lambda *_args: None)


def _window_ends_too_late(patch: pytest.MonkeyPatch) -> None:
    """One block more than is behind a window is given back."""
    trim = GroupBlocks.trim

    def greedy(self: GroupBlocks, rows: Any, num_computed: Any, last_step: int) -> Any:
        return trim(self, rows, num_computed + self.layout.block_size, last_step)

    patch.setattr(GroupBlocks, "trim", greedy)


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
    ("plant", "kinds"),
    [
        (_blocks_exchanged, ["latent"]),
        (_state_column_off_by_one, ["states"]),
        (_abort_keeps_blocks, ["latent"]),
        (_block_shared_too_early, ["latent"]),
        (_draft_states_not_committed, ["states"]),
        (_window_ends_too_late, ["window"]),
        (_state_too_early, ["states"]),
        (_state_in_the_middle, ["states"]),
        (_block_of_a_window_gone, ["window"]),
        (_groups_disagree, ["latent", "window"]),
        (_reference_not_counted, ["latent"]),
        (_hash_without_its_parent, ["latent"]),
        (_rejected_drafts_cached, ["latent"]),
        (_token_not_computed_cached, ["latent"]),
        (_hashes_survive_a_failed_step, ["latent"]),
    ],
)
@pytest.mark.usefixtures("loses_blocks")
def test_a_fault_is_found_by_names_alone(
    plant: Callable[[pytest.MonkeyPatch], None],
    kinds: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)

    def run_all() -> None:
        for seed in range(NUM_SEEDS):
            run_names(seed, kinds)

    with pytest.raises(RunnerError):
        run_all()
