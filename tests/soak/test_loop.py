"""A soak finds nothing in a sound loop, and a fault in the step that shows it."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from tests.soak.counts import Counts
from tests.soak.drivers import StagedDriver
from tests.soak.loop import SoakLoop
from tests.soak.rank import setup_of
from tests.soak.scenario import Scenario, draw_scenario, every_kind
from tests.soak.small import shortened, small

from bt_runner.arrays import Ints
from bt_runner.errors import VerificationError
from bt_runner.input_batch import InputBatch
from bt_runner.kv_cache_manager import GroupBlocks
from bt_tables import MultiGroupBlockTable, StagedBlockTables, StepTables
from bt_tables.sanitizer import BlockTableFaultError

CPU = torch.device("cpu")


def _loop(scenario: Scenario, counts: Counts, seed: int = 0) -> SoakLoop:
    return SoakLoop(scenario, CPU, random.Random(seed), counts)


def test_everything_at_once_is_sound_and_happens() -> None:
    counts = Counts()
    loop = _loop(replace(shortened(every_kind()), spare=0.2), counts, seed=1)

    loop.run(60)
    loop.drain()

    assert counts.num_steps + counts.num_broken_steps == loop.num_steps
    assert counts.num_checks == counts.num_steps * 4  # two ranks, two classes
    never = [name for name, count in asdict(counts).items() if not count]
    assert never == ["num_scenarios", "num_broken_steps", "num_findings", "num_lost_blocks"]


@pytest.mark.parametrize("seed", range(3))
def test_a_drawn_scenario_is_sound(seed: int) -> None:
    counts = Counts()
    loop = _loop(shortened(draw_scenario(random.Random(seed))), counts, seed)

    loop.run(20)
    loop.drain()

    assert counts.num_steps >= 15
    assert counts.num_ended > 0


def test_a_loop_that_fails_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soak.loop.BROKEN", 0.2)
    counts = Counts()
    loop = _loop(small(), counts)

    loop.run(60)
    monkeypatch.setattr("tests.soak.loop.BROKEN", 0.0)
    loop.drain()

    assert counts.num_broken_steps > 5


def test_an_append_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedBlockTables, "stage", lambda *_args, **_kwargs: None)

    with pytest.raises(BlockTableFaultError):
        _loop(small(), Counts()).run(5)


def test_rows_left_in_the_old_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sanitizer or by the comparison of both classes, whichever comes upon it first."""
    monkeypatch.setattr(MultiGroupBlockTable, "swap_rows", lambda *_args: None)

    with pytest.raises((BlockTableFaultError, VerificationError)):
        _loop(small(), Counts()).run(150)


def test_two_ranks_that_take_themselves_for_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.soak.loop.setup_of", lambda scenario, rank, device: setup_of(scenario, 0, device)
    )

    with pytest.raises(VerificationError, match="lies on 2 ranks, not on 1"):
        _loop(shortened(every_kind()), Counts()).run(5)


def test_classes_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards are off, so that only the comparison can see it."""
    monkeypatch.setattr("bt_runner.model_runner.TableGuard.check", lambda *_args: None)
    made = StagedDriver.step

    def short(self: StagedDriver, batch: InputBatch) -> StepTables:
        tables = made(self, batch)
        return StepTables(tables.block_tables, torch.full_like(tables.slot_mappings, -1))

    monkeypatch.setattr(StagedDriver, "step", short)

    with pytest.raises(VerificationError, match="slots of the two table classes differ"):
        _loop(small(), Counts()).run(5)


def test_a_dummy_step_that_names_a_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(self: StagedDriver, batch: InputBatch) -> StepTables:
        return self.step(replace(batch, rows_host=np.zeros_like(batch.rows_host)))

    monkeypatch.setattr(StagedDriver, "dummy_step", named)

    with pytest.raises(VerificationError, match="a dummy step's table names a block"):
        _loop(small(), Counts()).run(150)


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
    monkeypatch.setattr("tests.soak.loop.ORACLE_EVERY", 10_000)
    counts = Counts()
    loop = _loop(replace(small(), spare=1.0), counts)
    loop.run(20)

    with pytest.raises(VerificationError, match="group latent: 1 of 8 blocks did not come back"):
        loop.drain()

    assert counts.num_lost_blocks == 1
