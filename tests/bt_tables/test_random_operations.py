"""Promises 1 to 5 under random operations: every column and every slot equals the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.support.executors import CheckedExecutor, GuardedExecutor, InterpretedExecutor
from tests.support.poison import POISON
from tests.support.random_steps import (
    check_batch_order,
    check_slots,
    check_staged,
    check_tables,
)
from tests.support.random_tables import (
    random_batch,
    random_ids,
    random_layouts,
    random_rows,
)
from tests.support.table_model import TableModel

from bt_tables import MultiGroupBlockTable, StagedBlockTables
from bt_width import PAD_SLOT, BlockTableError

SEEDS = st.integers(0, 2**32 - 1)


class StagedMachine(RuleBasedStateMachine):
    """Two tables with the same edits: one steps, one makes the three separate calls."""

    max_num_reqs = 5

    def executor(self) -> GuardedExecutor:
        return CheckedExecutor()

    @initialize(seed=SEEDS)
    def create(self, seed: int) -> None:
        draw = random.Random(seed)
        layouts = random_layouts(draw, max_num_reqs=self.max_num_reqs)
        self.model = TableModel(layouts)
        self.executors = [self.executor(), self.executor()]
        self.tables = [StagedBlockTables(layouts, device=executor) for executor in self.executors]
        self.rows: list[int] = []

    @rule(seed=SEEDS, overwrite=st.booleans())
    def append(self, seed: int, overwrite: bool) -> None:
        draw = random.Random(seed)
        row = draw.randrange(self.max_num_reqs)
        ids = random_ids(draw, self.model, row, replace=overwrite)
        for table in self.tables:
            table.append_block_ids(row, ids, overwrite=overwrite)
        (self.model.replace if overwrite else self.model.append)(row, ids)

    @rule(seed=SEEDS, overwrite=st.booleans())
    def stage_many(self, seed: int, overwrite: bool) -> None:
        draw = random.Random(seed)
        rows = [draw.randrange(self.max_num_reqs) for _ in range(draw.randint(0, 6))]
        counts, flat = [], []
        for row in rows:
            ids = random_ids(draw, self.model, row, replace=overwrite, most=2)
            (self.model.replace if overwrite else self.model.append)(row, ids)
            counts.append([len(group_ids) for group_ids in ids])
            flat += [block_id for group_ids in ids for block_id in group_ids]
        shape = (len(rows), len(self.model.layouts))
        for table in self.tables:
            table.stage(
                np.array(rows, np.int32),
                np.array(counts, np.int32).reshape(shape),
                torch.tensor(flat, dtype=torch.int32),
                overwrite=overwrite,
            )

    @rule(row=st.integers(0, max_num_reqs - 1))
    def clear(self, row: int) -> None:
        for table in self.tables:
            table.clear_row(row)
        self.model.clear(row)

    @rule(seed=SEEDS)
    def null_prefix(self, seed: int) -> None:
        draw = random.Random(seed)
        row = draw.randrange(self.max_num_reqs)
        group = draw.randrange(len(self.model.layouts))
        num_blocks = draw.randint(0, self.model.num_blocks(row, group))
        for table in self.tables:
            table.null_prefix(row, group, num_blocks)
        self.model.null_prefix(row, group, num_blocks)

    @rule(seed=SEEDS)
    def refused_edits_change_nothing(self, seed: int) -> None:
        draw = random.Random(seed)
        row = draw.randrange(self.max_num_reqs)
        ids = random_ids(draw, self.model, row, replace=False)
        group = draw.randrange(len(ids))
        layout = self.model.layouts[group]
        bad = draw.choice(
            [
                [1] * (self.model.room(row, group) + 1),
                [-1],
                [layout.max_block_id + 1],
            ]
        )
        ids[group] = bad
        counts = np.array([[len(group_ids) for group_ids in ids]], np.int32)
        flat = np.array([block_id for group_ids in ids for block_id in group_ids], np.int64)
        for table in self.tables:
            with pytest.raises(BlockTableError):
                table.append_block_ids(row, ids)
            with pytest.raises(BlockTableError):
                table.append_block_ids(draw.choice([-1, self.max_num_reqs]), ids)
            with pytest.raises(BlockTableError):
                table.stage(np.array([row], np.int32), counts, flat.astype(np.int32))

    @rule(seed=SEEDS)
    def step(self, seed: int) -> None:
        draw = random.Random(seed)
        self.rows = random_rows(draw, self.model, self.rows)
        batch = random_batch(draw, self.model, self.rows)
        step = batch.as_step()
        fused, separate = self.tables
        found = fused.step(step)
        separate.apply_staged_writes()
        tables = separate.gather_block_tables(step.idx_mapping, step.num_reqs_padded)
        slots = separate.compute_slot_mappings(
            step.idx_mapping, step.query_start_loc, step.positions, step.num_tokens_padded
        )
        for ours, theirs in zip(found.block_tables, tables, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(found.slot_mappings, slots)
        for table in self.tables:
            check_tables(table, self.model, self.rows)
            check_slots(table, self.model, self.rows, batch)

    @rule(seed=SEEDS)
    def apply(self, seed: int) -> None:
        for table in self.tables:
            table.apply_staged_writes()
            check_tables(table, self.model, self.rows)

    @rule(num_reqs=st.integers(0, max_num_reqs))
    def dummy_tables(self, num_reqs: int) -> None:
        for table in self.tables:
            assert all(not found.any() for found in table.dummy_block_tables(num_reqs))
            check_tables(table, self.model, [])
        self.rows = []

    @rule()
    def dummy_slots(self) -> None:
        for table in self.tables:
            most = self.model.limits.max_num_batched_tokens
            assert (table.dummy_slot_mappings(most) == PAD_SLOT).all()

    @rule(rebind=st.booleans())
    def write_over_what_was_returned(self, rebind: bool) -> None:
        for table in self.tables:
            storage = table._storage
            storage.batch.fill_(POISON)
            storage.slots.fill_(POISON)
            if rebind:
                storage.device_groups.fill_(POISON)
                table.rebind()
            else:
                table.invalidate()
            rows = np.array(self.rows, np.int32)
            table.gather_block_tables(rows, len(rows))
            table.dummy_slot_mappings(0)
            check_tables(table, self.model, self.rows)

    @invariant()
    def nothing_is_written_outside(self) -> None:
        assert all(executor.intact for executor in self.executors)


class InterpretedMachine(StagedMachine):
    """The same through interpreted kernels, programs in random order."""

    def executor(self) -> GuardedExecutor:
        return InterpretedExecutor()


class BatchOrderMachine(RuleBasedStateMachine):
    """Rows in batch order: edits, commits of any size, slots."""

    max_num_reqs = 5

    def executor(self) -> GuardedExecutor:
        return CheckedExecutor()

    @initialize(seed=SEEDS)
    def create(self, seed: int) -> None:
        layouts = random_layouts(random.Random(seed), max_num_reqs=self.max_num_reqs)
        self.model = TableModel(layouts)
        self.guard = self.executor()
        self.table = MultiGroupBlockTable(layouts, device=self.guard)

    @rule(seed=SEEDS, add=st.booleans())
    def append(self, seed: int, add: bool) -> None:
        draw = random.Random(seed)
        row = draw.randrange(self.max_num_reqs)
        ids = random_ids(draw, self.model, row, replace=add)
        (self.table.add_row if add else self.table.append_row)(ids, row)
        (self.model.replace if add else self.model.append)(row, ids)

    @rule(row=st.integers(0, max_num_reqs - 1))
    def clear(self, row: int) -> None:
        self.table.clear_row(row)
        self.model.clear(row)

    @rule(src=st.integers(0, max_num_reqs - 1), dst=st.integers(0, max_num_reqs - 1))
    def move(self, src: int, dst: int) -> None:
        self.table.move_row(src, dst)
        self.model.move(src, dst)

    @rule(a=st.integers(0, max_num_reqs - 1), b=st.integers(0, max_num_reqs - 1))
    def swap(self, a: int, b: int) -> None:
        self.table.swap_rows(a, b)
        self.model.swap(a, b)

    @rule(seed=SEEDS)
    def null_prefix(self, seed: int) -> None:
        draw = random.Random(seed)
        row = draw.randrange(self.max_num_reqs)
        group = draw.randrange(len(self.model.layouts))
        num_blocks = draw.randint(0, self.model.num_blocks(row, group))
        self.table.null_prefix(row, group, num_blocks)
        self.model.null_prefix(row, group, num_blocks)

    @rule(seed=SEEDS)
    def refused_edits_change_nothing(self, seed: int) -> None:
        draw = random.Random(seed)
        row = draw.randrange(self.max_num_reqs)
        ids = random_ids(draw, self.model, row, replace=False)
        group = draw.randrange(len(ids))
        room = self.model.layouts[group].blocks_per_row
        too_many = [1] * (room + 1)
        for bad in (too_many, [-1], [self.model.layouts[group].max_block_id + 1]):
            ids[group] = bad
            with pytest.raises(BlockTableError):
                self.table.append_row(ids, row)
            with pytest.raises(BlockTableError):
                self.table.add_row(ids, row)

    @rule(seed=SEEDS)
    def commit(self, seed: int) -> None:
        draw = random.Random(seed)
        num_reqs = draw.randint(0, self.max_num_reqs)
        self.table.commit(num_reqs)
        rows = list(range(num_reqs))
        check_tables(self.table, self.model, rows)
        batch = random_batch(draw, self.model, rows)
        step = batch.as_step()
        slots = self.table.compute_slot_mappings(
            step.query_start_loc, step.positions, step.num_tokens_padded
        )
        assert slots.shape[1] == step.num_tokens_padded
        check_slots(self.table, self.model, rows, batch)

    @rule(rebind=st.booleans(), num_reqs=st.integers(0, max_num_reqs))
    def write_over_what_was_returned(self, rebind: bool, num_reqs: int) -> None:
        storage = self.table._storage
        storage.batch.fill_(POISON)
        storage.slots.fill_(POISON)
        if rebind:
            storage.device_groups.fill_(POISON)
            self.table.rebind()
        else:
            self.table.invalidate()
        self.table.commit(num_reqs)
        check_tables(self.table, self.model, list(range(num_reqs)))

    @invariant()
    def nothing_is_written_outside(self) -> None:
        assert self.guard.intact


class InterpretedBatchOrderMachine(BatchOrderMachine):
    """The same through interpreted kernels, programs in random order."""

    def executor(self) -> GuardedExecutor:
        return InterpretedExecutor()


def _run(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, database=None
        ),
    )


@pytest.mark.fast
def test_staged_rows_equal_the_oracle_after_any_operations() -> None:
    """Through the reference, which also proves each launch free of races."""
    _run(StagedMachine, examples=60, steps=40)


@pytest.mark.fast
def test_batch_order_rows_equal_the_oracle_after_any_operations() -> None:
    """Through the reference, which also proves each launch free of races."""
    _run(BatchOrderMachine, examples=60, steps=40)


@pytest.mark.fast
def test_interpreted_kernels_keep_staged_rows_in_any_order_of_programs() -> None:
    _run(InterpretedMachine, examples=3, steps=12)


@pytest.mark.fast
def test_interpreted_kernels_keep_batch_order_rows_in_any_order_of_programs() -> None:
    _run(InterpretedBatchOrderMachine, examples=3, steps=12)


@pytest.mark.parametrize("check", [check_staged, check_batch_order])
@pytest.mark.parametrize(
    ("executor_class", "seeds", "steps"),
    [
        pytest.param(CheckedExecutor, range(16), 40, id="reference"),
        pytest.param(InterpretedExecutor, range(4), 8, id="kernel"),
    ],
)
def test_many_edits_before_each_step(
    check: Callable[..., None],
    executor_class: Callable[[], GuardedExecutor],
    seeds: range,
    steps: int,
) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        executor = executor_class()
        check(random_layouts(draw, max_num_reqs=4), executor, draw, steps)
        assert executor.intact


@pytest.mark.long
@pytest.mark.parametrize(
    ("machine", "examples"),
    [
        pytest.param(StagedMachine, 1500, id="staged"),
        pytest.param(BatchOrderMachine, 1500, id="batch-order"),
        pytest.param(InterpretedMachine, 40, id="staged-interpreted"),
        pytest.param(InterpretedBatchOrderMachine, 40, id="batch-order-interpreted"),
    ],
)
def test_long_random_operations(machine: type[RuleBasedStateMachine], examples: int) -> None:
    _run(machine, examples=examples, steps=50)


@pytest.mark.long
@pytest.mark.parametrize("check", [check_staged, check_batch_order])
@pytest.mark.parametrize(
    ("executor_class", "seeds"),
    [
        pytest.param(CheckedExecutor, range(1000, 2500), id="reference"),
        pytest.param(InterpretedExecutor, range(1000, 1100), id="kernel"),
    ],
)
def test_long_many_edits_before_each_step(
    check: Callable[..., None], executor_class: Callable[[], GuardedExecutor], seeds: range
) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        check(random_layouts(draw), executor_class(), draw, 40)
