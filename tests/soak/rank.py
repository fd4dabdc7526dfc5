"""One rank of a context-parallel group: its plans, its tables of both classes, its builders."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from tests.soak.drivers import BatchOrderDriver, StagedDriver, TableDriver
from tests.soak.scenario import Scenario

from bt_builders import AttentionSetup, CommonAttentionMetadata, init_attention
from bt_runner.errors import VerificationError
from bt_runner.input_batch import InputBatch
from bt_runner.kv_cache_manager import KVCacheManager, TableEdits
from bt_runner.model_runner import TableGuard
from bt_runner.scheduler import SchedulerOutput
from bt_tables import MultiGroupBlockTable, StagedBlockTables, StepTables
from bt_width import NULL_BLOCK, PAD_SLOT


def setup_of(scenario: Scenario, rank: int, device: torch.device) -> AttentionSetup:
    """Return a rank's plans and builders."""
    context = replace(scenario.limits.context_parallel, rank=rank)
    limits = replace(scenario.limits, context_parallel=context)
    return init_attention(scenario.groups, limits, device)


class Rank:
    """What one rank keeps; nothing of it is shared with another rank.

    Attributes:
        layouts: Its plans.
    """

    def __init__(
        self, setup: AttentionSetup, kv: KVCacheManager, device: torch.device, draw: random.Random
    ) -> None:
        """Make empty tables."""
        self.layouts = setup.layouts
        self._setup = setup
        sizes = [pool.num_blocks for pool in kv.pools]
        self._drivers: tuple[TableDriver, ...] = (
            StagedDriver(
                StagedBlockTables(self.layouts, device=device, num_blocks=sizes),
                draw,
            ),
            BatchOrderDriver(
                MultiGroupBlockTable(self.layouts, device=device, num_blocks=sizes),
            ),
        )
        self._guards = [TableGuard(kv, self.layouts) for _ in self._drivers]

    def stage(self, batch: SchedulerOutput, edits: TableEdits) -> None:
        """Edit the rows of both classes."""
        for driver in self._drivers:
            driver.stage(batch, edits)

    def step(self, batch: SchedulerOutput, inputs: InputBatch) -> StepTables:
        """Return a batch's tables and slots: sound, and the same from both classes.

        Raises:
            BlockTableFaultError: The sanitizer found something.
            VerificationError: The two classes differ.
        """
        made = []
        for driver, guard in zip(self._drivers, self._guards, strict=True):
            tables = driver.step(inputs)
            guard.check(batch, inputs, tables)
            self._build(inputs, tables)
            made.append(tables)
        _require_equal(*made)
        return made[0]

    def dummy_step(self, inputs: InputBatch) -> None:
        """Run a batch of padding, as an idle rank does.

        Raises:
            VerificationError: It names a block or a slot.
        """
        for driver in self._drivers:
            tables = driver.dummy_step(inputs)
            self._build(inputs, tables)
            if any((table != NULL_BLOCK).any() for table in tables.block_tables):
                raise VerificationError("a dummy step's table names a block")
            if (tables.slot_mappings != PAD_SLOT).any():
                raise VerificationError("a dummy step's slot mapping names a slot")

    def forget(self, *, is_remapped: bool) -> None:
        """Mark what is on the device stale: a step failed, or memory was remapped."""
        for driver in self._drivers:
            if is_remapped:
                driver.tables.rebind()
            else:
                driver.tables.invalidate()

    def _build(self, inputs: InputBatch, tables: StepTables) -> None:
        attention = inputs.for_builders()
        for index, group in enumerate(self._setup.groups):
            common = CommonAttentionMetadata.from_step(group.layout, tables, index, attention)
            for builder in group.builders:
                builder.build(common)


def _require_equal(staged: StepTables, batch_order: StepTables) -> None:
    pairs = zip(staged.block_tables, batch_order.block_tables, strict=True)
    for group, (ours, theirs) in enumerate(pairs):
        if not torch.equal(ours, theirs):
            raise VerificationError(f"group {group}: the two table classes differ", group=group)
    if not torch.equal(staged.slot_mappings, batch_order.slot_mappings):
        raise VerificationError("the slots of the two table classes differ")
