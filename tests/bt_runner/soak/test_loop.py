"""A soak finds nothing in a sound loop, and a fault in the step that shows it."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import pytest
import torch
from tests.bt_runner.soak.small import shortened, small

from bt_runner.errors import VerificationError
from bt_runner.execution.batch import BatchArrays
from bt_runner.execution.graphs import GraphSize, stand_ins
from bt_runner.replay.sharing.rows import SharedRows
from bt_runner.scheduling.request import Request
from bt_runner.scheduling.step_plan import Scheduled
from bt_runner.soak.counts import Counts
from bt_runner.soak.drivers import StagedDriver
from bt_runner.soak.loop import SoakLoop
from bt_runner.soak.rank import setup_of
from bt_runner.soak.scenario import Scenario, draw_scenario, every_kind
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

    assert counts.num_steps == loop.num_steps
    assert counts.num_checks == counts.num_steps * 4  # two ranks, two classes
    never = [name for name, count in asdict(counts).items() if not count]
    assert never == ["num_scenarios", "num_broken_steps", "num_findings", "num_lost_blocks"]


@pytest.mark.parametrize("seed", range(6))
def test_a_drawn_scenario_is_sound(seed: int) -> None:
    counts = Counts()
    loop = _loop(shortened(draw_scenario(random.Random(seed))), counts, seed)

    loop.run(20)
    loop.drain()

    assert counts.num_steps >= 15
    assert counts.num_ended > 0


def test_a_loop_that_breaks_off_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bt_runner.soak.loop._BROKEN", 0.2)
    counts = Counts()
    loop = _loop(small(), counts)

    loop.run(60)
    monkeypatch.setattr("bt_runner.soak.loop._BROKEN", 0.0)
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
        "bt_runner.soak.loop.setup_of", lambda scenario, rank, device: setup_of(scenario, 0, device)
    )

    with pytest.raises(VerificationError, match="lies on 2 ranks, not on 1"):
        _loop(shortened(every_kind()), Counts()).run(5)


def test_classes_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards are off, so that only the comparison can see it."""
    monkeypatch.setattr("bt_runner.execution.guard.TableGuard.check", lambda *_args: None)
    made = StagedDriver.step

    def short(self: StagedDriver, batch: BatchArrays) -> StepTables:
        tables = made(self, batch)
        return StepTables(tables.block_tables, torch.full_like(tables.slot_mappings, -1))

    monkeypatch.setattr(StagedDriver, "step", short)

    with pytest.raises(VerificationError, match="slots of the two table classes differ"):
        _loop(small(), Counts()).run(5)


def test_a_dummy_step_that_names_a_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedDriver, "dummy_step", StagedDriver.step)
    monkeypatch.setattr("bt_runner.soak.loop.stand_ins", lambda _size: [_first_row()])

    with pytest.raises(VerificationError, match="a dummy step's table names a block"):
        _loop(small(), Counts()).run(150)


def _first_row() -> Scheduled:
    (stand_in,) = stand_ins(GraphSize(1, 1))
    return replace(stand_in, row=0)


@pytest.mark.usefixtures("loses_blocks")
def test_a_block_that_is_not_given_back_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    release = SharedRows.release

    def lossy(self: SharedRows, request: Request, *, last_step: int) -> None:
        if request.request_id == "0":
            del request.block_ids[0][0]
        release(self, request, last_step=last_step)

    monkeypatch.setattr(SharedRows, "release", lossy)
    monkeypatch.setattr("bt_runner.soak.verification._ORACLE_EVERY", 10_000)
    counts = Counts()
    loop = _loop(replace(small(), spare=1.0), counts)
    loop.run(20)

    with pytest.raises(VerificationError, match="group latent: 1 of 8 blocks did not come back"):
        loop.drain()

    assert counts.num_lost_blocks == 1
