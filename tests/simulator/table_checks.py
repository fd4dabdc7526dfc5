"""Looks at the tables of every step: the sanitizer, the contract, and the class in batch order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tests.simulator.batch_order import BatchOrderDriver

from bt_builders import AttentionSetup, CommonAttentionMetadata
from bt_runner.errors import VerificationError
from bt_runner.input_batch import InputBatch
from bt_runner.kv_cache_manager import KVCacheManager, TableEdits
from bt_runner.model_runner import TableGuard
from bt_runner.replay.check import StepCheck
from bt_runner.scheduler import SchedulerOutput
from bt_tables import MultiGroupBlockTable, StepTables
from bt_width import NULL_BLOCK, PAD_SLOT

CONTRACT_EVERY = 25
NUM_CLASSES = 2


class TableChecks:
    """Checks the steps of one rank, and keeps a second set of tables to compare with.

    Attributes:
        tables: The second set.
        is_derived: Whether every column and slot of the last step was derived again.
    """

    def __init__(
        self,
        names: Sequence[str],
        setup: AttentionSetup,
        kv: KVCacheManager,
        device: torch.device,
    ) -> None:
        """Take the groups' names, a rank's plans and builders, and which row holds which blocks."""
        sizes = [pool.num_blocks for pool in kv.pools]
        self.is_derived = False
        self._num_steps = 0
        self._setup = setup
        self._guards = [TableGuard(kv, setup.layouts) for _ in range(NUM_CLASSES)]
        self._contract = StepCheck(names, kv, setup.layouts)
        self.tables = MultiGroupBlockTable(setup.layouts, device=device, num_blocks=sizes)
        self._batch_order = BatchOrderDriver(self.tables)

    def stage(self, batch: SchedulerOutput, edits: TableEdits) -> None:
        """Edit the rows of the second class."""
        self._batch_order.stage(batch, edits)

    def check(self, batch: SchedulerOutput, inputs: InputBatch, tables: StepTables) -> None:
        """Check a step's tables, of both classes.

        Raises:
            BlockTableFaultError: The sanitizer found something.
            VerificationError: The classes differ, or the contract says something else.
        """
        both = tables, self._batch_order.step(inputs)
        for guard, of_class in zip(self._guards, both, strict=True):
            guard.check(batch, inputs, of_class)
            self._build(inputs, of_class)
        _require_equal(*both)
        self.is_derived = self._num_steps % CONTRACT_EVERY == 0
        if self.is_derived:
            self._contract.check(batch, inputs, tables)
        self._num_steps += 1

    def check_dummy(self, inputs: InputBatch, tables: StepTables) -> None:
        """Check a batch of padding.

        Raises:
            VerificationError: It names a block or a slot.
        """
        for of_class in (tables, self._batch_order.dummy_step(inputs)):
            self._build(inputs, of_class)
            if any((table != NULL_BLOCK).any() for table in of_class.block_tables):
                raise VerificationError("a dummy step's table names a block")
            if (of_class.slot_mappings != PAD_SLOT).any():
                raise VerificationError("a dummy step's slot mapping names a slot")

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
