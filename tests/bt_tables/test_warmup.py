"""Promise of the warmup: every launch of a step happens once, and nothing changes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.executors import CheckedExecutor, InterpretedExecutor, LateExecutor
from tests.support.tables import batch_of, columns, plan_groups

from bt_tables import MultiGroupBlockTable, StagedBlockTables
from bt_tables.devices import CsrLaunch
from bt_width import AttentionSpec, MambaSpec, ServingLimits

pytestmark = pytest.mark.fast

LIMITS = ServingLimits(max_model_len=64, max_num_reqs=3, max_num_batched_tokens=8)
LAYOUTS = plan_groups(LIMITS, (AttentionSpec(block_size=8), 4), MambaSpec(block_size=8))


class CsrCounter(CheckedExecutor):
    """Counts the launches of compressed rows, too."""

    def __init__(self) -> None:
        """Nothing was launched yet."""
        super().__init__()
        self.tokens_per_column: list[int] = []

    def csr_launch(self) -> CsrLaunch:
        """Return a launch that is noted."""
        inner = super().csr_launch()

        def launch(*arguments: object) -> None:
            self.tokens_per_column.append(arguments[-1])  # type: ignore[arg-type]  # as the kernel was given them
            inner(*arguments)  # type: ignore[arg-type]  # as the kernel was given them

        return launch


@pytest.mark.parametrize("tables_class", [StagedBlockTables, MultiGroupBlockTable])
def test_a_warmup_is_one_program_of_a_step_and_compressed_rows_of_ids_and_slots(
    tables_class: type[StagedBlockTables | MultiGroupBlockTable],
) -> None:
    executor = CsrCounter()
    tables = tables_class(LAYOUTS, device=executor)

    tables.warmup()

    assert (executor.counts.launches, executor.counts.programs) == (1, 1)
    assert executor.tokens_per_column == [0, 4]
    assert executor.intact


@pytest.mark.parametrize("executor_class", [CheckedExecutor, InterpretedExecutor])
def test_a_warmup_between_steps_changes_nothing(
    executor_class: type[CheckedExecutor | InterpretedExecutor],
) -> None:
    tables = StagedBlockTables(LAYOUTS, device=executor_class())
    tables.append_block_ids(1, [[5, 6], [3]])
    before = tables.step(batch_of([1], [[0, 9]], num_tokens_padded=4))
    slots = before.slot_mappings.clone()
    tables.append_block_ids(1, [[7], []])

    tables.warmup()

    assert np.array_equal(before.slot_mappings, slots)
    assert columns(before.block_tables[0], 0, 4) == [10, 11, 12, 13]
    after = tables.step(batch_of([1], [[17]])).block_tables
    assert columns(after[0], 0, 6) == [10, 11, 12, 13, 14, 15]
    assert columns(after[1], 0, 1) == [3]


@pytest.mark.parametrize("tables_class", [StagedBlockTables, MultiGroupBlockTable])
def test_a_warmup_returns_after_the_device_has_done_it(
    tables_class: type[StagedBlockTables | MultiGroupBlockTable],
) -> None:
    """Otherwise it would read a packet that was given back, or be counted as a step's time."""
    executor = LateExecutor()
    tables = tables_class(LAYOUTS, device=executor)

    tables._rows.warm_up()
    assert executor.mark() == executor.done > 0
    tables.warmup()
    assert executor.mark() == executor.done
