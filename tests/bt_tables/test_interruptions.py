"""No edit and no launch is ever torn: whatever raises, at whatever instruction."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from dis import findlinestarts
from functools import partial
from types import FrameType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.bt_runner.faults.interruptions import Interruption, Place, interrupt_at, passes_of
from tests.support.executors import CheckedExecutor
from tests.support.random_steps import check_slots, check_tables, edit_batch_order, edit_staged
from tests.support.random_tables import random_batch, random_layouts, random_rows
from tests.support.table_model import TableModel
from tests.support.tables import batch_of, columns, plan_groups

from bt_tables import (
    MultiGroupBlockTable,
    StagedBlockTables,
    _checks,
    _packet,
    _rows,
    _storage,
    base,
    devices,
    multi_group,
    staged,
)
from bt_tables._storage import Storage
from bt_tables.devices import StepLaunch
from bt_tables.reference import fused_step
from bt_width import PAD_SLOT, AttentionSpec, ServingLimits

MODULES = [
    _checks, _packet, _rows, _storage, base, devices, multi_group, staged, fused_step,
]  # fmt: skip
LIMITS = ServingLimits(max_model_len=128, max_num_reqs=4, max_num_batched_tokens=16)
LAYOUTS = plan_groups(LIMITS, (AttentionSpec(block_size=8), 4), AttentionSpec(block_size=16))
ROWS = [2, 0, 3, 1]
POSITIONS = [[0, 9], [17], [], [33, 8, 16]]

Tables = StagedBlockTables | MultiGroupBlockTable


@dataclass(frozen=True)
class Operation:
    """A call, and what it does to the model.

    Attributes:
        call: What is interrupted.
        then: What the model holds after it.
    """

    call: Callable[[Any], object]
    then: Callable[[TableModel], object]


def _nothing(model: TableModel) -> None:
    del model


def _staged_two(model: TableModel) -> None:
    model.append(0, [[31, 32], [33]])
    model.append(2, [[], [34]])


def _staged_repeating(model: TableModel) -> None:
    model.append(1, [[41], [42]])
    model.append(3, [[43], []])
    model.append(1, [[44], [45]])


def stage(rows: list[int], counts: list[list[int]], ids: list[int]) -> Callable[[Any], object]:
    arrays = (np.array(rows, np.int32), np.array(counts, np.int32), np.array(ids, np.int32))

    def call(tables: Any) -> None:
        many = tables.stage if isinstance(tables, StagedBlockTables) else tables.append_rows
        many(*arrays)

    return call


TWO = stage([0, 2], [[2, 1], [0, 1]], [31, 32, 33, 34])
REPEATING = stage([1, 3, 1], [[1, 1], [1, 0], [1, 1]], [41, 42, 43, 44, 45])
STEP = batch_of([1, 1, 3], [[3], [9, 20], []], num_reqs_padded=4, num_tokens_padded=7)
SAME = batch_of([0, 1, 2], [[8], [9], [0]])

STAGED: dict[str, Operation] = {
    "append": Operation(
        lambda tables: tables.append_block_ids(0, [[21, 22], [23]]),
        lambda model: model.append(0, [[21, 22], [23]]),
    ),
    "append to a row that waits": Operation(
        lambda tables: tables.append_block_ids(1, [[21], [22, 23]]),
        lambda model: model.append(1, [[21], [22, 23]]),
    ),
    "replace": Operation(
        lambda tables: tables.append_block_ids(2, [[21], []], overwrite=True),
        lambda model: model.replace(2, [[21], []]),
    ),
    "stage": Operation(TWO, _staged_two),
    "stage rows that wait and repeat": Operation(REPEATING, _staged_repeating),
    "null prefix": Operation(
        lambda tables: tables.null_prefix(0, 0, 2), lambda model: model.null_prefix(0, 0, 2)
    ),
    "clear": Operation(lambda tables: tables.clear_row(1), lambda model: model.clear(1)),
    "step": Operation(lambda tables: tables.step(STEP), _nothing),
    "step of the same batch": Operation(lambda tables: tables.step(SAME), _nothing),
    "apply": Operation(lambda tables: tables.apply_staged_writes(), _nothing),
    "slots": Operation(lambda tables: tables.compute_slot_mappings(*SAME[:3], 8), _nothing),
    "rebind": Operation(lambda tables: tables.rebind(), _nothing),
    "warmup": Operation(lambda tables: tables._rows.warm_up(), _nothing),
}
BATCH: dict[str, Operation] = {
    "append": Operation(
        lambda tables: tables.append_row([[21, 22], [23]], 0),
        lambda model: model.append(0, [[21, 22], [23]]),
    ),
    "add": Operation(
        lambda tables: tables.add_row([[21], []], 2), lambda model: model.replace(2, [[21], []])
    ),
    "append rows": Operation(TWO, _staged_two),
    "append rows that wait and repeat": Operation(REPEATING, _staged_repeating),
    "swap": Operation(lambda tables: tables.swap_rows(0, 3), lambda model: model.swap(0, 3)),
    "move": Operation(lambda tables: tables.move_row(2, 0), lambda model: model.move(2, 0)),
    "null prefix": Operation(
        lambda tables: tables.null_prefix(0, 0, 2), lambda model: model.null_prefix(0, 0, 2)
    ),
    "clear": Operation(lambda tables: tables.clear_row(1), lambda model: model.clear(1)),
    "commit": Operation(lambda tables: tables.commit(3), _nothing),
    "slots": Operation(lambda tables: tables.compute_slot_mappings(*SAME[1:3], 8), _nothing),
}


def staged_tables() -> tuple[StagedBlockTables, TableModel]:
    """Rows on the device, rows that wait as arrays and as lists, and a batch of three."""
    tables, model = StagedBlockTables(LAYOUTS, device="cpu"), TableModel(LAYOUTS)
    for row, ids in ((0, [[1, 2, 3], [4]]), (1, [[5], [6]]), (2, [[7, 8], [9, 10]])):
        tables.append_block_ids(row, ids)
        model.append(row, ids)
    tables.step(batch_of([0, 1, 2], [[1], [2], [3]]))
    stage([1], [[2, 0]], [11, 12])(tables)
    model.append(1, [[11, 12], []])
    tables.append_block_ids(2, [[13], [14]])
    model.append(2, [[13], [14]])
    tables.null_prefix(2, 1, 1)
    model.null_prefix(2, 1, 1)
    return tables, model


def batch_tables() -> tuple[MultiGroupBlockTable, TableModel]:
    """Rows on the device in another order than they were made, and rows that wait."""
    tables, model = MultiGroupBlockTable(LAYOUTS, device="cpu"), TableModel(LAYOUTS)
    for row, ids in ((0, [[1, 2, 3], [4]]), (1, [[5], [6]]), (2, [[7, 8], [9, 10]])):
        tables.append_row(ids, row)
        model.append(row, ids)
    tables.commit(3)
    tables.swap_rows(1, 2)
    model.swap(1, 2)
    tables.commit(2)
    stage([1], [[2, 0]], [11, 12])(tables)
    model.append(1, [[11, 12], []])
    tables.append_row([[13], [14]], 2)
    model.append(2, [[13], [14]])
    return tables, model


def seen(tables: Tables) -> list[Any]:
    """Everything a step leaves behind, whatever the batch was."""
    if isinstance(tables, StagedBlockTables):
        found = tables.step(batch_of(ROWS, POSITIONS, num_tokens_padded=16))
        return [*(table.tolist() for table in found.block_tables), found.slot_mappings.tolist()]
    tables.commit(4)
    slots = tables.compute_slot_mappings(*batch_of([0, 1, 2, 3], POSITIONS)[1:3], 16)
    return [*(tables.block_table(group).tolist() for group in range(2)), slots.tolist()]


def expected(model: TableModel, tables: Tables) -> list[Any]:
    """What ``seen`` has to return."""
    rows = ROWS if isinstance(tables, StagedBlockTables) else [0, 1, 2, 3]
    starts, positions = [0, 2, 3, 3, 6], [place for places in POSITIONS for place in places]
    slots = [model.slots(rows, starts, positions, group, 16) for group in range(2)]
    return [*(model.table(rows, group).tolist() for group in range(2)), slots]


def append_everywhere(tables: Tables, models: list[TableModel], *, arrays: bool) -> None:
    """Give every row a block in each group, by arrays or by lists."""
    if arrays:
        ids = [part + row for row in range(4) for part in (51, 61)]
        stage([0, 1, 2, 3], [[1, 1]] * 4, ids)(tables)
    for row in range(4):
        of_row = [[51 + row], [61 + row]]
        for model in models:
            model.append(row, of_row)
        if arrays:
            continue
        if isinstance(tables, StagedBlockTables):
            tables.append_block_ids(row, of_row)
        else:
            tables.append_row(of_row, row)


def counts_of(tables: Tables | TableModel) -> list[list[int]]:
    """How many blocks every row holds in each group."""
    return [[tables.num_blocks(row, group) for group in range(2)] for row in range(4)]


COMMITS = {"_put", "change", "finish", "move"}
"""Functions that make a change true and carry it over: between any two of their lines is a
state of its own, so that each line is interrupted, the last time it is come to, before
each kind of call."""


def is_line_of_a_commit(place: Place) -> bool:
    code, offset = place
    return code.co_name in COMMITS and offset in dict(findlinestarts(code))


def check_interruptions(
    make: Callable[[], tuple[Tables, TableModel]], operation: Operation, every: int
) -> int:
    """Interrupt an operation at every n-th of its instructions; return how often."""
    tables, _ = make()
    passes = passes_of(MODULES, lambda: operation.call(tables))
    places = list(passes)
    kinds = ["launch", "launch", "lists", "arrays"]
    tried = [
        (place, 1, kinds[number % 4], number % 3 > 0)
        for number, place in enumerate(places[len(places) % every :: every])
    ]
    tried += [
        (place, passes[place], next_call, False)
        for place in filter(is_line_of_a_commit, places)
        for next_call in ("launch", "lists", "arrays", "counts")
    ]
    return sum(interrupt_once(make, operation, *one) for one in tried)


def interrupt_once(
    make: Callable[[], tuple[Tables, TableModel]],
    operation: Operation,
    place: Place,
    nth: int,
    next_call: str,
    invalidates: bool,
) -> bool:
    """Interrupt an operation at one place and look at what comes after; whether it was."""
    tables, before = make()
    _, after = make()
    operation.then(after)
    ended = not interrupt_at(place, MODULES, partial(operation.call, tables), nth=nth)
    results = [after] if ended else [before, after]
    if invalidates:
        tables.invalidate()
    if next_call == "counts":
        results = [model for model in results if counts_of(model) == counts_of(tables)]
    elif next_call != "launch":
        append_everywhere(tables, results, arrays=next_call == "arrays")
    found = seen(tables)
    matching = [model for model in results if expected(model, tables) == found]
    assert matching, place

    # nothing of it shows later: the rows go on from what they hold
    append_everywhere(tables, matching[:1], arrays=False)
    assert seen(tables) == expected(matching[0], tables), place
    return not ended


@pytest.mark.parametrize("name", STAGED)
def test_a_staged_table_is_as_before_or_after_an_interrupted_call(name: str) -> None:
    assert check_interruptions(staged_tables, STAGED[name], every=29) > 0


@pytest.mark.parametrize("name", BATCH)
def test_a_batch_order_table_is_as_before_or_after_an_interrupted_call(name: str) -> None:
    # the order of the rows is changed in few instructions, each of which may tear it
    every = 1 if name in ("swap", "move") else 29
    assert check_interruptions(batch_tables, BATCH[name], every) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", STAGED)
def test_long_a_staged_table_interrupted_at_every_instruction(name: str) -> None:
    assert check_interruptions(staged_tables, STAGED[name], every=1) > 50


@pytest.mark.long
@pytest.mark.parametrize("name", BATCH)
def test_long_a_batch_order_table_interrupted_at_every_instruction(name: str) -> None:
    assert check_interruptions(batch_tables, BATCH[name], every=1) > 50


class FailingExecutor(CheckedExecutor):
    """A device whose next copy or launch can be told to fail: before, half-way, or after."""

    fails: Literal["never", "copy", "before", "half", "after"] = "never"

    def __init__(self, seed: int) -> None:
        """Draw what a launch that fails half-way has done from ``seed``."""
        super().__init__()
        self._rng = np.random.default_rng(seed)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(destination, source)
        if self.fails == "copy":
            raise RuntimeError("copy failed")

    def step_launch(self, storage: Storage) -> StepLaunch:
        inner = super().step_launch(storage)

        def launch(
            packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
        ) -> None:
            if self.fails == "half":
                self._half(storage, packet, starts, positions)
            elif self.fails != "before":
                inner(packet, starts, positions, programs)
            if self.fails != "never":
                raise RuntimeError("launch failed")

        return launch

    def _half(self, storage: Storage, *launched: torch.Tensor) -> None:
        arrays = [tensor.numpy() for tensor in launched]
        work = fused_step.step_work(storage, *arrays)
        flats = (storage.rows, storage.batch, storage.slots)
        for flat, (places, values) in zip(flats, (work.rows, work.batch, work.slots), strict=True):
            done = self._rng.random(len(places)) < 0.5
            flat.numpy()[places[done]] = values[done]


def check_staged_failures(seed: int) -> None:
    draw = random.Random(seed)
    layouts = random_layouts(draw, max_num_reqs=4)
    executor = FailingExecutor(seed)
    model, tables = TableModel(layouts), StagedBlockTables(layouts, device=executor)
    rows: list[int] = []
    for _ in range(12):
        for _ in range(draw.randint(0, 4)):
            edit_staged(draw, model, tables)
        rows = random_rows(draw, model, rows)
        batch = random_batch(draw, model, rows)
        executor.fails = draw.choice(["never", "copy", "before", "half", "after"])
        try:
            tables.step(batch.as_step())
        except RuntimeError:
            for _ in range(draw.randint(0, 3)):
                edit_staged(draw, model, tables)
            if draw.random() < 0.5:
                tables.invalidate()
            if draw.random() < 0.5:
                rows = random_rows(draw, model, rows)
                batch = random_batch(draw, model, rows)
            executor.fails = "never"
            tables.step(batch.as_step())
        check_tables(tables, model, rows)
        check_slots(tables, model, rows, batch)
    assert executor.intact


def check_batch_failures(seed: int) -> None:
    draw = random.Random(seed)
    layouts = random_layouts(draw, max_num_reqs=4)
    executor = FailingExecutor(seed)
    model, tables = TableModel(layouts), MultiGroupBlockTable(layouts, device=executor)
    for _ in range(12):
        for _ in range(draw.randint(0, 4)):
            edit_batch_order(draw, model, tables)
        rows = list(range(draw.randint(0, 4)))
        batch = random_batch(draw, model, rows)
        step = batch.as_step()
        executor.fails = draw.choice(["never", "copy", "before", "half", "after"])
        try:
            tables.commit(len(rows))
        except RuntimeError:
            executor.fails = "never"
            # what the rows hold is in doubt: no slot before the next commit
            slots = tables.compute_slot_mappings(
                step.query_start_loc, step.positions, len(step.positions)
            )
            assert (slots == PAD_SLOT).all()
            for _ in range(draw.randint(0, 3)):
                edit_batch_order(draw, model, tables)
            tables.commit(len(rows))
        check_tables(tables, model, rows)
        executor.fails = draw.choice(["never", "copy", "before", "half", "after"])
        try:
            tables.compute_slot_mappings(
                step.query_start_loc, step.positions, step.num_tokens_padded
            )
        except RuntimeError:
            executor.fails = "never"
            tables.commit(len(rows))
            tables.compute_slot_mappings(
                step.query_start_loc, step.positions, step.num_tokens_padded
            )
        check_slots(tables, model, rows, batch)
    assert executor.intact


@pytest.mark.parametrize("check", [check_staged_failures, check_batch_failures])
def test_launches_that_fail_leave_no_wrong_row_behind(check: Callable[[int], None]) -> None:
    for seed in range(12):
        check(seed)


@pytest.mark.long
@pytest.mark.parametrize("check", [check_staged_failures, check_batch_failures])
def test_long_launches_that_fail_leave_no_wrong_row_behind(check: Callable[[int], None]) -> None:
    for seed in range(1000, 1100):
        check(seed)


def one_group(executor: FailingExecutor) -> StagedBlockTables:
    limits = ServingLimits(max_model_len=256, max_num_reqs=2, max_num_batched_tokens=8)
    return StagedBlockTables(plan_groups(limits, AttentionSpec(block_size=16)), device=executor)


def test_a_step_that_raises_right_after_its_launch_loses_no_block() -> None:
    executor = FailingExecutor(0)
    tables = one_group(executor)
    tables.append_block_ids(0, [[3]])
    tables.step(batch_of([0], [[0]]))
    tables.append_block_ids(0, [[4]])
    executor.fails = "after"
    with pytest.raises(RuntimeError):
        tables.step(batch_of([0], [[0]]))
    executor.fails = "never"

    tables.invalidate()
    (table,) = tables.step(batch_of([0], [[16]])).block_tables

    assert columns(table, 0, 2) == [3, 4]


@pytest.mark.parametrize("fails", ["half", "after"])
def test_blocks_of_a_launch_that_failed_have_no_slot_later(fails: Any) -> None:
    """What it wrote past the blocks that the row holds in the end is null."""
    executor = FailingExecutor(1)
    tables = one_group(executor)
    tables.append_block_ids(0, [[3, 4, 5, 6]])
    executor.fails = fails
    with pytest.raises(RuntimeError):
        tables.apply_staged_writes()
    executor.fails = "never"

    tables.invalidate()
    tables.append_block_ids(0, [[9]], overwrite=True)
    tables.apply_staged_writes()
    found = tables.step(batch_of([0], [[3, 20, 50]]))

    assert found.slot_mappings.tolist() == [[147, PAD_SLOT, PAD_SLOT]]
    assert columns(found.block_tables[0], 0, 1) == [9]
    assert columns(tables.rows(0), 0, 1) == [9]


def interrupt_after(seconds: float, work: Callable[[], object]) -> None:
    """Do ``work`` until a timer raises ``Interruption`` in it, which goes no further."""
    armed = True

    def ring(number: int, frame: FrameType | None) -> None:
        if armed:
            raise Interruption

    before = signal.signal(signal.SIGALRM, ring)
    # the timer may ring between any two of these lines, too
    with suppress(Interruption):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            work()
        finally:
            armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def check_timer(calls: int, seed: int) -> None:
    draw = random.Random(seed)
    model, tables = TableModel(LAYOUTS), StagedBlockTables(LAYOUTS, device="cpu")
    rows: list[int] = []
    for _ in range(calls):
        for _ in range(draw.randint(0, 3)):
            edit_staged(draw, model, tables)
        rows = random_rows(draw, model, rows)
        batch = random_batch(draw, model, rows)
        step = batch.as_step()
        interrupt_after(draw.uniform(1e-6, 1.5e-3), partial(tables.step, step))
        if draw.random() < 0.3:
            continue
        tables.step(step)
        check_tables(tables, model, rows)
        check_slots(tables, model, rows, batch)


def test_a_timer_at_random_moments_of_steps_leaves_no_wrong_row() -> None:
    check_timer(200, seed=5)


@pytest.mark.long
def test_long_a_timer_at_random_moments_of_steps_leaves_no_wrong_row() -> None:
    check_timer(4000, seed=6)
