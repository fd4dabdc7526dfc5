"""A wrong block id is found in the step in which it would be read, before any layer reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.bt_runner.harness import Traffic, greedy_traffic, tiny_engine

from bt_runner.__main__ import main
from bt_runner.block_pool import BlockPool
from bt_runner.engine import Engine
from bt_runner.models.paged_model import PagedModel
from bt_tables import StagedBlockTables, StepBatch, StepTables
from bt_tables.sanitizer import BlockTableFaultError, FaultKind

BROKEN_STEP = 4


def _start(traffic: Traffic) -> Engine:
    engine = tiny_engine()
    for prompt, params in zip(traffic.prompts, traffic.params, strict=True):
        engine.add_request(prompt, params)
    for _ in range(BROKEN_STEP - 1):
        engine.step()
    return engine


def _another_block(tables: StepTables) -> None:
    tables.block_tables[0][1, 0] = tables.block_tables[0][0, 0]


def _freed_block(tables: StepTables) -> None:
    tables.block_tables[1][0, 0] = 59


def _stale_tail(tables: StepTables) -> None:
    tables.block_tables[0][0, 20] = 7


def _slot_of_a_neighbour(tables: StepTables) -> None:
    tables.slot_mappings[0, 0] = tables.block_tables[0][1, 0] * 4


def _null_block(tables: StepTables) -> None:
    tables.block_tables[2][0, 0] = 0


@pytest.mark.parametrize(
    ("fault", "group"),
    [
        pytest.param(_another_block, 0, id="a-neighbours-block"),
        pytest.param(_freed_block, 1, id="a-free-block"),
        pytest.param(_stale_tail, 0, id="a-stale-tail"),
        pytest.param(_slot_of_a_neighbour, 0, id="a-slot-of-a-neighbour"),
        pytest.param(_null_block, 2, id="a-null-state"),
    ],
)
def test_a_fault_is_found_before_a_layer_reads(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[StepTables], None], group: int
) -> None:
    """The finding names the group; the engine goes on when the fault is gone."""
    engine = _start(greedy_traffic(1, (9, 14), max_new_tokens=8))
    step = StagedBlockTables.step

    def broken(self: StagedBlockTables, batch: StepBatch) -> StepTables:
        tables = step(self, batch)
        fault(tables)
        return tables

    def read(*_: object) -> list[torch.Tensor]:
        pytest.fail("a layer read the tables")

    with monkeypatch.context() as patch:
        patch.setattr(StagedBlockTables, "step", broken)
        patch.setattr(PagedModel, "forward", read)
        with pytest.raises(BlockTableFaultError) as caught:
            engine.step()
    assert group in {finding.group for finding in caught.value.report.findings}
    assert FaultKind.UNSTABLE not in {finding.kind for finding in caught.value.report.findings}
    while engine.has_work:
        engine.step()
    assert [pool.num_used for pool in engine.pools] == [0, 0, 0]


def test_the_command_line_ends_with_1_at_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And without one as ever."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One line.\nAnother one.\n")
    command = ["demo", "--prompts", str(prompts), "--max-new-tokens", "3", "--sanitize"]
    assert main(command) == 0
    step = StagedBlockTables.step

    def broken(self: StagedBlockTables, batch: StepBatch) -> StepTables:
        tables = step(self, batch)
        tables.block_tables[0][0, 0] += 1
        return tables

    monkeypatch.setattr(StagedBlockTables, "step", broken)
    assert main(command) == 1
    assert "group 0" in capsys.readouterr().err


def test_a_pool_at_fault_ends_the_command_with_1_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the pool says to blocks that are given back does not stand before the finding."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One line.\nAnother one.\n")
    step = StagedBlockTables.step
    pools: list[BlockPool] = []
    monkeypatch.setattr(BlockPool, "__init__", _noting(pools))

    def freeing(self: StagedBlockTables, batch: StepBatch) -> StepTables:
        tables = step(self, batch)
        pools[0].release([1], last_step=0)
        return tables

    monkeypatch.setattr(StagedBlockTables, "step", freeing)
    assert main(["demo", "--prompts", str(prompts), "--sanitize"]) == 1
    assert "group 0" in capsys.readouterr().err


def _noting(pools: list[BlockPool]) -> Callable[[BlockPool, int], None]:
    make = BlockPool.__init__

    def noted(self: BlockPool, num_blocks: int) -> None:
        make(self, num_blocks)
        pools.append(self)

    return noted


def test_the_references_of_a_pool_are_counted_block_by_block() -> None:
    """The null block is never held."""
    pool = BlockPool(5)
    first, _ = pool.allocate(2)
    pool.acquire([first])
    assert pool.references.tolist() == [0, 2, 1, 0, 0]
