"""What a step's layers read: tables and slots brought up to date and checked, then metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bt_builders import AttentionSetup, CommonAttentionMetadata
from bt_runner.execution.batch import BatchBuffers, assemble
from bt_runner.execution.graphs import GraphSize
from bt_runner.execution.guard import TableGuard
from bt_runner.execution.staging import stage_plan
from bt_runner.models.step import GroupStep, ModelStep
from bt_runner.scheduling.step_plan import Scheduled, StepPlan
from bt_tables import StagedBlockTables
from bt_width import ServingLimits


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step, ready for the layers.

    Attributes:
        commons: What the builders of each group were given.
        step: What the layers are given.
    """

    commons: list[CommonAttentionMetadata]
    step: ModelStep


class StepPreparation:
    """Keeps the tables and the builders of all cache groups.

    Attributes:
        layouts: The groups' plans.
        builders: The builders of each group.
        guard: What checks the tables of every step, or None.
    """

    def __init__(
        self,
        group_names: Sequence[str],
        setup: AttentionSetup,
        num_blocks: Sequence[int],
        limits: ServingLimits,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make empty tables, and room for the largest step.

        Args:
            group_names: What the cache groups are called.
            setup: Their plans and builders.
            num_blocks: Blocks of each group's pool, the null block included.
            limits: What is served.
            device: Where all of it lies.
            dtype: Of the model.
        """
        self.layouts = setup.layouts
        self.builders = [group.builders for group in setup.groups]
        self.guard: TableGuard | None = None
        self._group_names = tuple(group_names)
        self._max_model_len = limits.max_model_len
        self._dtype = dtype
        self._tables = StagedBlockTables(self.layouts, device=device, num_blocks=num_blocks)
        self._buffers = BatchBuffers(limits, device)

    def stage(self, plan: StepPlan) -> None:
        """Stage what a plan changes in the rows."""
        stage_plan(self._tables, plan)

    def forget_tables(self) -> None:
        """Take nothing on the device for granted: a step broke off."""
        self._tables.invalidate()

    def prepare(self, scheduled: Sequence[Scheduled], size: GraphSize | None) -> StepInputs:
        """Update the tables and build all metadata, padded to ``size``.

        Raises:
            BlockTableFaultError: The guard found something.
        """
        batch = assemble(
            scheduled,
            self._buffers,
            num_reqs_padded=size and size.num_reqs,
            num_tokens_padded=size and size.num_reqs * size.query_len,
        )
        tables = self._tables.step(batch.for_tables())
        if self.guard is not None:
            self.guard.check(scheduled, batch, tables)
        # what is captured must do for requests of any length
        longest = self._max_model_len if size else None
        commons = batch.for_builders(self.layouts, tables, longest)
        groups = {
            name: GroupStep(common, [builder.build(common) for builder in builders])
            for name, builders, common in zip(
                self._group_names, self.builders, commons, strict=True
            )
        }
        step = ModelStep(
            token_ids=batch.token_ids,
            positions=batch.positions,
            req_of_token=batch.req_of_token,
            groups=groups,
            dtype=self._dtype,
        )
        return StepInputs(commons, step)
