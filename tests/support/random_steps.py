"""Dense random steps: several edits of few rows before each, and everything compared after it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from tests.support.poison import CANARY
from tests.support.random_tables import RandomBatch, random_batch, random_ids, random_rows
from tests.support.table_model import TableModel

from bt_tables import MultiGroupBlockTable, StagedBlockTables, StepBatch
from bt_tables.devices import Executor
from bt_width import BlockTableLayout


def unchanged(batch: StepBatch, step: int) -> StepBatch:
    """Hand a batch over as it is."""
    del step
    return batch


class Gaps:
    """The places of the flat tensors that belong to no table: planted, and looked at again."""

    def __init__(self, tables: StagedBlockTables | MultiGroupBlockTable) -> None:
        """Plant a canary in every gap."""
        storage = tables._storage
        tables_at = [group.table_at for group in storage.groups]
        slots_at = [group.slots_at for group in storage.groups]
        sizes = [storage.num_rows * group.addressing.width for group in storage.groups]
        self._flats = (storage.rows, storage.batch, storage.slots)
        self._masks = (
            _outside(storage.rows, tables_at, sizes),
            _outside(storage.batch, tables_at, sizes),
            _outside(storage.slots, slots_at, [storage.num_slots] * len(slots_at)),
        )
        for flat, mask in zip(self._flats, self._masks, strict=True):
            flat[mask] = CANARY

    @property
    def intact(self) -> bool:
        """Whether nothing was written into a gap."""
        return all(
            bool((flat[mask] == CANARY).all())
            for flat, mask in zip(self._flats, self._masks, strict=True)
        )


def _outside(flat: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    mask = torch.ones_like(flat, dtype=torch.bool)
    for start, size in zip(starts, sizes, strict=True):
        mask[start : start + size] = False
    return mask


def check_staged(
    layouts: Sequence[BlockTableLayout],
    device: Executor | str,
    draw: random.Random,
    steps: int,
    hand_over: Callable[[StepBatch, int], StepBatch] = unchanged,
) -> None:
    """Run ``steps`` of rows by request index, and compare every column and every slot."""
    model, tables = TableModel(layouts), StagedBlockTables(layouts, device=device)
    gaps = Gaps(tables)
    rows: list[int] = []
    for step in range(steps):
        for _ in range(draw.randint(0, 5)):
            edit_staged(draw, model, tables)
        if draw.random() < 0.1:
            tables.dummy_block_tables(model.limits.max_num_reqs)
        rows = random_rows(draw, model, rows)
        batch = random_batch(draw, model, rows)
        tables.step(hand_over(batch.as_step(), step))
        check_tables(tables, model, rows)
        check_slots(tables, model, rows, batch)
        assert gaps.intact


def edit_staged(draw: random.Random, model: TableModel, tables: StagedBlockTables) -> None:
    """Edit a random row in a random way, in the tables and in the model."""
    row = draw.randrange(model.limits.max_num_reqs)
    group = draw.randrange(len(model.layouts))
    match draw.randrange(5):
        case 0:
            num_blocks = model.num_blocks(row, group)
            tables.null_prefix(row, group, num_blocks - num_blocks // 3)
            model.null_prefix(row, group, num_blocks - num_blocks // 3)
        case 1:
            ids = random_ids(draw, model, row, replace=True)
            tables.append_block_ids(row, ids, overwrite=True)
            model.replace(row, ids)
        case 2:
            _stage_two(draw, model, tables)
        case _:
            ids = random_ids(draw, model, row, replace=False, most=4)
            tables.append_block_ids(row, ids)
            model.append(row, ids)


def _stage_two(
    draw: random.Random, model: TableModel, tables: StagedBlockTables | MultiGroupBlockTable
) -> None:
    overwrite = draw.random() < 0.3
    rows = [draw.randrange(model.limits.max_num_reqs) for _ in range(2)]
    counts, flat = [], []
    for row in rows:
        ids = random_ids(draw, model, row, replace=overwrite, most=3)
        (model.replace if overwrite else model.append)(row, ids)
        counts.append([len(of_group) for of_group in ids])
        flat += [block_id for of_group in ids for block_id in of_group]
    many = tables.stage if isinstance(tables, StagedBlockTables) else tables.append_rows
    many(
        np.array(rows, np.int32),
        np.array(counts, np.int32),
        np.array(flat, np.int32),
        overwrite=overwrite,
    )


def check_batch_order(
    layouts: Sequence[BlockTableLayout], device: Executor | str, draw: random.Random, steps: int
) -> None:
    """Run ``steps`` commits of rows in batch order, and compare every column and every slot."""
    model, tables = TableModel(layouts), MultiGroupBlockTable(layouts, device=device)
    gaps, most = Gaps(tables), model.limits.max_num_reqs
    for _ in range(steps):
        for _ in range(draw.randint(0, 5)):
            edit_batch_order(draw, model, tables)
        rows = list(range(draw.randint(0, most)))
        tables.commit(len(rows))
        check_tables(tables, model, rows)
        batch = random_batch(draw, model, rows)
        step = batch.as_step()
        tables.compute_slot_mappings(step.query_start_loc, step.positions, step.num_tokens_padded)
        check_slots(tables, model, rows, batch)
        assert gaps.intact


def edit_batch_order(draw: random.Random, model: TableModel, tables: MultiGroupBlockTable) -> None:
    """Edit a random row in a random way, in the tables and in the model."""
    row, other = (draw.randrange(model.limits.max_num_reqs) for _ in range(2))
    group = draw.randrange(len(model.layouts))
    match draw.randrange(7):
        case 6:
            _stage_two(draw, model, tables)
        case 0:
            num_blocks = model.num_blocks(row, group)
            tables.null_prefix(row, group, num_blocks - num_blocks // 3)
            model.null_prefix(row, group, num_blocks - num_blocks // 3)
        case 1:
            ids = random_ids(draw, model, row, replace=True)
            tables.add_row(ids, row)
            model.replace(row, ids)
        case 2:
            tables.move_row(row, other)
            model.move(row, other)
        case 3:
            tables.swap_rows(row, other)
            model.swap(row, other)
        case _:
            ids = random_ids(draw, model, row, replace=False, most=4)
            tables.append_row(ids, row)
            model.append(row, ids)


def check_tables(
    tables: StagedBlockTables | MultiGroupBlockTable, model: TableModel, rows: Sequence[int]
) -> None:
    """Every column of every batch row, tails and rows past the batch included."""
    held = tables._storage.block_tables(model.limits.max_num_reqs)
    for group in range(len(model.layouts)):
        assert torch.equal(held[group].cpu(), model.table(rows, group))


def check_slots(
    tables: StagedBlockTables | MultiGroupBlockTable,
    model: TableModel,
    rows: Sequence[int],
    batch: RandomBatch,
) -> None:
    """Every slot of every group, to the end of the buffer."""
    slots = tables._storage.slot_mappings(model.limits.max_num_batched_tokens)
    for group in range(len(model.layouts)):
        expected = model.slots(rows, batch.starts, batch.positions, group, batch.num_tokens_padded)
        assert slots[group].tolist() == expected
