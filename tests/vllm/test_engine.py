"""The checks against vLLM 0.33 itself: no false alarm, and every planted fault in its step.

Runs where vLLM is installed alone: ``hatch run vllm:test``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "vllm", reason="vLLM is not installed here; `hatch run vllm:test` has an environment for it"
)

from tests.support.vllm_engine import (
    MAX_REQS,
    Engine,
    full,
    hybrid,
    mla_and_indexer,
    sliding_and_full,
)

from bt_tables.integrations.vllm.plugin import patch_v1, patch_v2
from bt_tables.integrations.vllm.settings import Settings
from bt_tables.sanitizer import BlockTableFaultError, FaultKind

STEPS = 1000
FEWER_STEPS = 300
DRAFTS = 3
Specs = Callable[[], list[Any]]
Plant = Callable[[Engine, Any, Any, Any], bool]

RUNNERS = pytest.mark.parametrize("runner", ["MRV2", "MRV1"])
SHARDED = {"shards": 2, "rank": 1}
CONFIGURATIONS = [
    pytest.param(full, {}, id="full"),
    pytest.param(sliding_and_full, {}, id="sliding-and-full"),
    pytest.param(mla_and_indexer, SHARDED, id="mla-and-indexer-second-of-two"),
    pytest.param(hybrid, {}, id="hybrid-mamba-align"),
]


def checked_engine(
    folder: Path,
    specs: Specs,
    *,
    runner: str = "MRV2",
    seed: int = 0,
    **options: Any,
) -> Engine:
    """Return an engine whose runner is patched as the plugin patches vLLM's."""
    engine = Engine(folder, specs(), runner=runner, seed=seed, **options)
    runner_class = type("CheckedRunner", (type(engine.runner),), {})
    patch = patch_v2 if runner == "MRV2" else patch_v1
    patch(runner_class, Settings(directory=folder / "reports"))
    engine.runner.__class__ = runner_class
    return engine


def run(engine: Engine, steps: int) -> list[Any]:
    """Run steps; return their batches, None where a step had no tokens."""
    return [engine.step() for _ in range(steps)]


@RUNNERS
@pytest.mark.parametrize(("specs", "options"), CONFIGURATIONS)
def test_a_sound_engine_has_no_finding(
    tmp_path: Path, specs: Specs, options: dict[str, int], runner: str
) -> None:
    engine = checked_engine(tmp_path, specs, runner=runner, seed=7, **options)
    engine.start()

    batches = run(engine, STEPS)

    assert_checked(engine, batches)
    # states take few blocks, so that no request is preempted
    assert engine.num_preempted or specs is hybrid


@RUNNERS
@pytest.mark.parametrize(
    ("drafts", "is_async"),
    [
        pytest.param(DRAFTS, False, id="drafts"),
        pytest.param(0, True, id="asynchronous"),
        pytest.param(DRAFTS, True, id="asynchronous-drafts"),
    ],
)
@pytest.mark.parametrize("specs", [full, sliding_and_full, hybrid])
def test_drafts_and_asynchronous_scheduling_have_no_finding(
    tmp_path: Path, specs: Callable[..., list[Any]], drafts: int, is_async: bool, runner: str
) -> None:
    """An asynchronous scheduler counts drafts as computed before it knows which are accepted."""
    if specs is hybrid:
        specs = functools.partial(hybrid, drafts)
    engine = checked_engine(
        tmp_path, specs, runner=runner, seed=5, drafts=drafts, is_async=is_async
    )
    engine.start()

    batches = run(engine, FEWER_STEPS)

    assert_checked(engine, batches)
    assert bool(engine.num_rejected) == bool(drafts)


def assert_checked(engine: Engine, batches: list[Any]) -> None:
    """Every step with tokens was checked, and there was traffic."""
    num_batches = sum(batch is not None for batch in batches)
    check = engine.runner._bt_tables_check
    assert check is not None, "the checks ended before the engine did"
    assert check._step == num_batches > len(batches) * 0.9
    assert engine.count > len(batches) / 20


def live(engine: Engine, batch: Any, row: int) -> int:
    """Return the blocks that a request's tokens need in the first group."""
    return -(-int(batch.seq_lens[row]) // (16 * engine.shards))


def long_rows(engine: Engine, batch: Any, blocks: int) -> list[int]:
    return [row for row in range(batch.num_reqs) if live(engine, batch, row) >= blocks]


def stale_row(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """A batch row holds another request's blocks."""
    rows = long_rows(engine, batch, 2)
    if len(rows) < 2:
        return False
    tables[0][rows[0]] = tables[0][rows[1]].clone()
    return True


def swapped_columns(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """Two columns that the step reads are exchanged."""
    for row in long_rows(engine, batch, 4):
        tables[0][row, :2] = tables[0][row, :2].flip(0)
        return True
    return False


def freed_block(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """A row holds a block that no request holds."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    if not free:
        return False
    tables[0][0, 0] = free[0]
    return True


def missing_block(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """A block did not reach the device."""
    tables[0][0, live(engine, batch, 0) - 1] = 0
    return True


def garbage_id(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """A column was never written."""
    tables[0][0, 0] = 2_147_480_000
    return True


def padding_row(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """A row above the batch holds an id."""
    if tables[0].shape[0] == batch.num_reqs:
        return False
    tables[0][batch.num_reqs, 0] = 3
    return True


def slot_past_int32(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """A slot lies past 2^31."""
    slots[0][0] = 2**31 + 5
    return True


def neighbours_slot(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """A token's slot is in another request's block."""
    rows = long_rows(engine, batch, 1)
    if len(rows) < 2:
        return False
    # the last block is not shared
    other = int(tables[0][rows[1], live(engine, batch, rows[1]) - 1])
    slots[0][int(batch.query_start_loc[rows[0]])] = other * 16 + 3
    return True


def slot_not_padded(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """A slot above the real tokens is that of an earlier step."""
    tokens = int(batch.query_start_loc[batch.num_reqs])
    if slots[0].shape[0] == tokens:
        return False
    slots[0][tokens] = int(tables[0][0, 0]) * 16
    return True


def falling_starts(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """The starts of the queries fall."""
    if batch.num_reqs < 2:
        return False
    batch.query_start_loc[1] = batch.query_start_loc[2] + 1
    return True


def length_past_the_row(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """A length counts tokens for which the row has no block."""
    batch.seq_lens[0] += 64
    return True


def window_nulled_too_far(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """The first block of a window is null."""
    for row in range(batch.num_reqs):
        queries = batch.query_start_loc.diff()
        computed = int(batch.seq_lens[row]) - int(queries[row])
        if computed > 64:
            tables[1][row, (computed - 39) // 16] = 0
            return True
    return False


def another_ranks_token(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """A token that this rank does not keep has a slot."""
    tokens = int(batch.query_start_loc[batch.num_reqs])
    for token in range(tokens):
        if slots[0][token] == -1:
            slots[0][token] = int(tables[0][0, 0]) * 16
            return True
    return False


def rotated_states(engine: Engine, tables: Any, slots: Any, batch: Any) -> bool:
    """The rows of three requests are rotated in the group of states."""
    if batch.num_reqs < 3:
        return False
    tables[1][:3] = tables[1][:3].roll(1, dims=0)
    return True


FAULTS = [
    (stale_row, full, {}, {FaultKind.WRONG_BLOCK}),
    (swapped_columns, full, {}, {FaultKind.WRONG_BLOCK}),
    (freed_block, full, {}, {FaultKind.FREED_BLOCK}),
    (missing_block, sliding_and_full, {}, {FaultKind.NULL_BLOCK}),
    (garbage_id, hybrid, {}, {FaultKind.OUT_OF_POOL}),
    (padding_row, full, {}, {FaultKind.PADDING_ROW}),
    (slot_past_int32, full, {}, {FaultKind.SLOT_OUT_OF_POOL}),
    (neighbours_slot, full, {}, {FaultKind.NEIGHBOUR_SLOT}),
    (slot_not_padded, sliding_and_full, {}, {FaultKind.PADDING_SLOT}),
    (falling_starts, full, {}, {FaultKind.QUERY_START}),
    (length_past_the_row, full, {}, {FaultKind.TOO_FEW_BLOCKS, FaultKind.LENGTH}),
    (window_nulled_too_far, sliding_and_full, {}, {FaultKind.NULL_BLOCK}),
    (another_ranks_token, mla_and_indexer, SHARDED, {FaultKind.FOREIGN_TOKEN}),
    (rotated_states, hybrid, {}, {FaultKind.WRONG_BLOCK}),
]


@RUNNERS
@pytest.mark.parametrize(
    ("plant", "specs", "options", "kinds"),
    [pytest.param(*fault, id=fault[0].__name__) for fault in FAULTS],
)
def test_a_planted_fault_is_found_in_its_step(
    tmp_path: Path,
    plant: Plant,
    specs: Specs,
    options: dict[str, int],
    kinds: set[FaultKind],
    runner: str,
) -> None:
    engine = checked_engine(tmp_path, specs, runner=runner, seed=3, **options)
    # a batch that is never full has rows above it
    engine.most_requests = MAX_REQS - 1
    engine.start()
    run(engine, 25)
    planted: list[Any] = []

    def damage(tables: Any, slots: Any, batch: Any) -> None:
        assert not planted, "the step with the fault was passed"
        if plant(engine, tables, slots, batch):
            planted.append(batch)

    engine.runner.damage = damage

    with pytest.raises(BlockTableFaultError) as raised:
        run(engine, 40)

    assert planted
    assert kinds & {finding.kind for finding in raised.value.report.findings}
    assert list((tmp_path / "reports").glob("*.html"))


@RUNNERS
def test_a_width_off_by_one_is_found_before_the_first_step(tmp_path: Path, runner: str) -> None:
    """With both derivations."""
    engine = checked_engine(tmp_path, full, runner=runner)

    with pytest.raises(BlockTableFaultError) as raised:
        engine.start(width_error=1)

    (finding,) = raised.value.report.findings
    assert finding.kind is FaultKind.WIDTH
    assert "max_num_blocks_per_req(512) is 32 blocks" in str(finding.value)
    assert "= 32 columns" in str(finding.expected)


@RUNNERS
def test_a_block_that_the_manager_frees_too_early_is_found_when_it_is_given_again(
    tmp_path: Path, runner: str
) -> None:
    engine = checked_engine(tmp_path, full, runner=runner, seed=3)
    engine.start()
    batch = None
    while batch is None or engine.steps < 25:
        batch = engine.step()
    pool = engine.scheduler.kv_cache_manager.block_pool
    manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    name = max(
        engine.scheduler.requests,
        key=lambda name: engine.scheduler.requests[name].num_computed_tokens,
    )
    block = manager.req_to_blocks[name][-1]
    block.ref_cnt = 0
    pool.free_block_queue.prepend_n([block])

    with pytest.raises(BlockTableFaultError) as raised:
        run(engine, 20)

    kinds = {finding.kind for finding in raised.value.report.findings}
    assert kinds & {FaultKind.SHARED_WRITE, FaultKind.DUPLICATE_BLOCK}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
