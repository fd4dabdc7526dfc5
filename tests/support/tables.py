"""Short ways to make tables and batches, on the reference and on the interpreted kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from tests.support.executors import CheckedExecutor, InterpretedExecutor

from bt_tables import StagedBlockTables, StepBatch
from bt_tables.devices import Executor
from bt_width import BlockTableLayout, CacheSpec, ServingLimits

on_reference_and_kernel = pytest.mark.parametrize(
    "executor_class",
    [pytest.param(CheckedExecutor, id="reference"), pytest.param(InterpretedExecutor, id="kernel")],
)
"""Gives a test ``executor_class``: the reference's, then the interpreted kernels'."""


def plan_groups(
    limits: ServingLimits, *groups: CacheSpec | tuple[CacheSpec, int]
) -> list[BlockTableLayout]:
    """Plan each spec, or each spec and kernel block size."""
    pairs = [group if isinstance(group, tuple) else (group, None) for group in groups]
    return [BlockTableLayout.plan(spec, limits, size) for spec, size in pairs]


def batch_of(
    rows: Sequence[int],
    positions: Sequence[Sequence[int]] | None = None,
    *,
    num_reqs_padded: int | None = None,
    num_tokens_padded: int | None = None,
) -> StepBatch:
    """The batch of these rows, each with the tokens at its positions; none by default."""
    each = [()] * len(rows) if positions is None else positions
    starts = np.cumsum([0, *(len(places) for places in each)]).astype(np.int32)
    flat = [place for places in each for place in places]
    return StepBatch(
        idx_mapping=np.array(rows, np.int32),
        query_start_loc=starts,
        positions=np.array(flat, np.int64),
        num_reqs_padded=len(rows) if num_reqs_padded is None else num_reqs_padded,
        num_tokens_padded=len(flat) if num_tokens_padded is None else num_tokens_padded,
    )


def slots_of_row(
    layouts: Sequence[BlockTableLayout],
    block_ids: Sequence[Sequence[int]],
    positions: Sequence[int],
    executor_class: Callable[[], Executor] = CheckedExecutor,
) -> list[list[int]]:
    """The slots, in every group, of a request that holds these blocks."""
    tables = StagedBlockTables(layouts, device=executor_class())
    tables.append_block_ids(0, block_ids)
    found: list[list[int]] = tables.step(batch_of([0], [positions])).slot_mappings.tolist()
    return found


class _OnDevice(torch.Tensor):
    """A tensor of the CPU that tables take for one of a device."""

    is_cpu = False


def on_device(array: object) -> torch.Tensor:
    """The same ints as tables on a CPU take them for a device's: nothing reads them early."""
    return torch.as_tensor(array).as_subclass(_OnDevice)


def columns(table: torch.Tensor, row: int, count: int) -> list[int]:
    """The first columns of a row; the others must be null."""
    assert not table[row, count:].any()
    found: list[int] = table[row, :count].tolist()
    return found
