"""Every product of rows and widths is 64-bit: tables of more than 2^31 ids, in sparse memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.executors import InterpretedExecutor
from tests.support.sparse import sparse_zeros
from tests.support.tables import batch_of, plan_groups

from bt_tables import StagedBlockTables
from bt_tables._storage import Storage
from bt_tables.devices import CpuExecutor, CsrLaunch, StepLaunch
from bt_width import AttentionSpec, ServingLimits, WidthMismatchError

WIDTH = 2**28
LAST_ROW = 8
LIMITS = ServingLimits(max_model_len=WIDTH, max_num_reqs=LAST_ROW + 1, max_num_batched_tokens=16)


class SparseExecutor(CpuExecutor):
    """A CPU whose zeros take memory only where they are written to."""

    def memory_bytes(self) -> int:
        """Sparse memory is without end."""
        return 2**62

    def full(self, size: int, dtype: torch.dtype, value: int) -> torch.Tensor:
        return super().full(size, dtype, value) if value else sparse_zeros(size, dtype)


class SparseInterpretedExecutor(SparseExecutor):
    """The same, with the interpreted kernels."""

    def step_launch(self, storage: Storage) -> StepLaunch:
        return InterpretedExecutor().step_launch(storage)

    def csr_launch(self) -> CsrLaunch:
        return InterpretedExecutor().csr_launch()


on_both = pytest.mark.parametrize(
    "executor_class",
    [
        pytest.param(SparseExecutor, id="reference"),
        pytest.param(SparseInterpretedExecutor, id="kernel"),
    ],
)


def far_tables(executor: CpuExecutor) -> StagedBlockTables:
    """Two groups, each of more than 2^31 ids."""
    spec = AttentionSpec(block_size=1, token_alignment=None)
    return StagedBlockTables(plan_groups(LIMITS, spec, spec), device=executor)


@on_both
def test_rows_batch_rows_and_slots_past_2_to_31_ids(
    executor_class: Callable[[], CpuExecutor],
) -> None:
    """An edit and a copy of the last row, its slots fresh and old, and compressed rows."""
    tables = far_tables(executor_class())
    assert LAST_ROW * WIDTH >= 2**31
    order = [-1] * LAST_ROW + [LAST_ROW]
    tokens: list[list[int]] = [[] for _ in range(LAST_ROW)]
    tables.append_block_ids(LAST_ROW, [[5, 6], [7]])

    fresh = tables.step(batch_of(order, [*tokens, [0, 1]])).slot_mappings.tolist()
    tables.append_block_ids(LAST_ROW, [[8], [9]])
    found = tables.step(batch_of(order, [*tokens, [1, 2]]))

    assert fresh == [[5, 6], [7, -1]]
    assert found.slot_mappings.tolist() == [[6, 8], [9, -1]]
    for group, ids in ((0, [5, 6, 8]), (1, [7, 9])):
        for table in (tables.rows(group), found.block_tables[group]):
            assert table[LAST_ROW, : len(ids) + 1].tolist() == [*ids, 0]
            # not where an address of 32 bits would wrap to
            assert table[0, :4].tolist() == [0, 0, 0, 0]
    lengths = np.array([0] * LAST_ROW + [3], np.int32)
    assert tables.gather_csr(0, lengths, LAST_ROW + 1).indices.tolist() == [5, 6, 8]
    assert tables.gather_token_csr(0, lengths, LAST_ROW + 1).indices.tolist() == [5, 6, 8]


@on_both
def test_a_row_is_copied_from_and_nulled_past_2_to_31_ids(
    executor_class: Callable[[], CpuExecutor],
) -> None:
    tables = far_tables(executor_class())
    tables.append_block_ids(LAST_ROW, [[5, 6, 7], [8]])
    tables.apply_staged_writes()
    (near, _) = tables.step(batch_of([LAST_ROW])).block_tables
    assert near[0, :4].tolist() == [5, 6, 7, 0]

    tables.null_prefix(LAST_ROW, 0, 1)
    tables.append_block_ids(0, [[9], [9]])
    far = tables.step(batch_of([0] + [-1] * (LAST_ROW - 1) + [LAST_ROW])).block_tables[0]

    assert far[LAST_ROW, :4].tolist() == [0, 6, 7, 0]
    assert far[0, :2].tolist() == [9, 0]
    assert tables.rows(0)[LAST_ROW, :4].tolist() == [0, 6, 7, 0]


def test_counts_that_no_int32_can_add_up_are_refused() -> None:
    """2^32 blocks that wrap to none: each count is one that a row has room for."""
    limits = ServingLimits(max_model_len=2**28, max_num_reqs=16, max_num_batched_tokens=4)
    spec = AttentionSpec(block_size=1, token_alignment=None)
    tables = StagedBlockTables(plan_groups(limits, spec), device=SparseExecutor())
    rows, counts = np.arange(16, dtype=np.int32), np.full((16, 1), 2**28, np.int32)

    with pytest.raises(WidthMismatchError, match="counts add up to 4294967296; there are 0 ids"):
        tables.stage(rows, counts, np.empty(0, np.int32))
