"""One rank of a context-parallel group: its plans, its tables of both classes, its builders."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from bt_builders import AttentionSetup, init_attention
from bt_runner.errors import VerificationError
from bt_runner.execution.batch import BatchArrays
from bt_runner.execution.guard import TableGuard
from bt_runner.scheduling.block_pool import BlockPool
from bt_runner.scheduling.step_plan import Scheduled, StepPlan
from bt_runner.soak.drivers import BatchOrderDriver, StagedDriver, TableDriver
from bt_runner.soak.scenario import Scenario
from bt_tables import MultiGroupBlockTable, StagedBlockTables, StepTables
from bt_width import NULL_BLOCK, PAD_SLOT, BlockTableLayout


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
        self,
        setup: AttentionSetup,
        pools: tuple[BlockPool, ...],
        device: torch.device,
        draw: random.Random,
    ) -> None:
        """Make empty tables."""
        self.layouts: tuple[BlockTableLayout, ...] = setup.layouts
        self._builders = [group.builders for group in setup.groups]
        sizes = [pool.num_blocks for pool in pools]
        self._drivers: tuple[TableDriver, ...] = (
            StagedDriver(
                StagedBlockTables(self.layouts, device=device, num_blocks=sizes),
                draw,
            ),
            BatchOrderDriver(
                MultiGroupBlockTable(self.layouts, device=device, num_blocks=sizes),
            ),
        )
        self._guards = [TableGuard(self.layouts, pools) for _ in self._drivers]

    def stage(self, plan: StepPlan) -> None:
        """Edit the rows of both classes."""
        for driver in self._drivers:
            driver.stage(plan)

    def step(self, scheduled: list[Scheduled], batch: BatchArrays) -> StepTables:
        """Return a batch's tables and slots: sound, and the same from both classes.

        Raises:
            BlockTableFaultError: The sanitizer found something.
            VerificationError: The two classes differ.
        """
        made = []
        for driver, guard in zip(self._drivers, self._guards, strict=True):
            tables = driver.step(batch)
            guard.check(scheduled, batch, tables)
            self._build(batch, tables)
            made.append(tables)
        _require_equal(*made)
        return made[0]

    def dummy_step(self, batch: BatchArrays) -> None:
        """Run a batch in which nobody is, as an idle rank does.

        Raises:
            VerificationError: It names a block or a slot.
        """
        for driver in self._drivers:
            tables = driver.dummy_step(batch)
            self._build(batch, tables)
            if any((table != NULL_BLOCK).any() for table in tables.block_tables):
                raise VerificationError("a dummy step's table names a block")
            if (tables.slot_mappings != PAD_SLOT).any():
                raise VerificationError("a dummy step's slot mapping names a slot")

    def forget(self, *, is_remapped: bool) -> None:
        """Take nothing on the device for granted: a step broke off, or memory was remapped."""
        for driver in self._drivers:
            if is_remapped:
                driver.tables.rebind()
            else:
                driver.tables.invalidate()

    def _build(self, batch: BatchArrays, tables: StepTables) -> None:
        commons = batch.for_builders(self.layouts, tables)
        for common, builders in zip(commons, self._builders, strict=True):
            for builder in builders:
                builder.build(common)


def _require_equal(staged: StepTables, batch_order: StepTables) -> None:
    pairs = zip(staged.block_tables, batch_order.block_tables, strict=True)
    for group, (ours, theirs) in enumerate(pairs):
        if not torch.equal(ours, theirs):
            raise VerificationError(f"group {group}: the two table classes differ", group=group)
    if not torch.equal(staged.slot_mappings, batch_order.slot_mappings):
        raise VerificationError("the slots of the two table classes differ")
