"""One rank of a context-parallel group: tables, builders and caches that no other rank has."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from tests.bt_runner.harness import recompute
from tests.simulator.names_model import NamesModel, Texts
from tests.simulator.scenario import NamesScenario
from tests.simulator.table_checks import TableChecks

from bt_builders import AttentionSetup, init_attention
from bt_runner.cuda_graphs import GraphOptions
from bt_runner.input_batch import InputBatch, InputBuffers, dummy_batch
from bt_runner.kv_cache_manager import KVCacheManager, TableEdits
from bt_runner.model_runner import InFlightStep, ModelRunner
from bt_runner.requests import RunningRequests
from bt_runner.scheduler import SchedulerOutput
from bt_tables import StagedBlockTables, StepBatch, StepTables
from bt_tables.base import BlockTables
from bt_width import ServingLimits


def setup_of(scenario: NamesScenario, rank: int, device: torch.device) -> AttentionSetup:
    """Return a rank's plans and builders; where only names are checked, those of states alone."""
    limits = scenario.serving.limits
    context = replace(limits.context_parallel, rank=rank)
    setup = init_attention(scenario.groups, replace(limits, context_parallel=context), device)
    if scenario.is_checked:
        return setup
    groups = [
        group if group.layout.slot_mode == "none" else replace(group, ubatches=((),))
        for group in setup.groups
    ]
    return replace(setup, groups=tuple(groups))


class Rank:
    """The engine's model runner over a model of names.

    Attributes:
        runner: Runs the rank's steps.
        model: What they compute.
        checks: What looks at their tables; None where only names are checked.
    """

    def __init__(
        self,
        scenario: NamesScenario,
        setup: AttentionSetup,
        kv: KVCacheManager,
        texts: Texts,
        device: torch.device,
        draw: random.Random,
    ) -> None:
        """Make empty tables and caches."""
        serving = scenario.serving
        self.model = NamesModel(setup, kv, texts)
        self.checks: TableChecks | None = None
        if scenario.is_checked:
            self.checks = TableChecks(scenario.names, setup, kv, device)
        self._setup = setup
        self._tables = _SplitSteps(
            setup.layouts,
            device=device,
            num_blocks=[pool.num_blocks for pool in kv.pools],
            max_steps_in_flight=serving.max_steps_in_flight,
        )
        self._tables.draw = draw if scenario.is_checked else None
        self.runner = ModelRunner(
            setup,
            self.model,
            self.model.sample,
            tables=self._tables,
            limits=setup.layouts[0].limits,
            device=device,
            dtype=torch.float32,
            graphs=GraphOptions(batch_sizes=serving.batch_sizes, capture=recompute),
            max_steps_in_flight=serving.max_steps_in_flight,
            checks=[self.model, *([self.checks] if self.checks else [])],
        )
        self._inputs = self.runner.inputs
        self.runner.inputs = _PaddedInputs(self._inputs, serving.limits, draw)

    def stage(self, batch: SchedulerOutput, edits: TableEdits) -> None:
        """Edit the rows for a step that comes no further."""
        edits.stage(self._tables)
        if self.checks is not None:
            self.checks.stage(batch, edits)

    def launch(
        self, step: int, batch: SchedulerOutput, edits: TableEdits, table: RunningRequests
    ) -> InFlightStep:
        """Run a step."""
        if self.checks is not None:
            self.checks.stage(batch, edits)
        return self.runner.launch(step, batch, edits, table)

    def dummy_step(self, num_reqs: int, query_len: int) -> None:
        """Run a batch of padding, as an idle rank does."""
        inputs = self._inputs.pack(dummy_batch(num_reqs, query_len), RunningRequests(1))
        tables = self._tables.dummy_step(inputs)
        if self.checks is not None:
            self.checks.check_dummy(inputs, tables)

    def invalidate(self) -> None:
        """Mark what is on the device stale: a step failed."""
        for tables in self._all_tables():
            tables.invalidate()

    def remap(self) -> None:
        """Write what is on the device anew: its memory was mapped again."""
        for tables in self._all_tables():
            tables.rebind()
        self._setup.rebind()

    def _all_tables(self) -> list[BlockTables]:
        return [self._tables, *([self.checks.tables] if self.checks else [])]


class _SplitSteps(StagedBlockTables):
    """Tables whose steps are made of one call or, now and then, of three."""

    draw: random.Random | None

    def step(self, batch: StepBatch) -> StepTables:
        if self.draw is None or self.draw.random() < 0.7:
            return super().step(batch)
        self.apply_staged_writes()
        slots = self.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, batch.num_tokens_padded
        )
        return StepTables(self.gather_block_tables(batch.idx_mapping, batch.num_reqs_padded), slots)

    def dummy_step(self, inputs: InputBatch) -> StepTables:
        """Return the tables and slots of a batch of padding."""
        if self.draw is None or self.draw.random() < 0.5:
            return super().step(inputs.for_tables())
        return StepTables(
            self.dummy_block_tables(inputs.num_reqs), self.dummy_slot_mappings(inputs.num_tokens)
        )


class _PaddedInputs(InputBuffers):
    """Input buffers that pad steps of any kind, beside those that a captured graph pads."""

    def __init__(self, inner: InputBuffers, limits: ServingLimits, draw: random.Random) -> None:
        self._inner = inner
        self._limits = limits
        self._draw = draw

    def pack(
        self,
        batch: SchedulerOutput,
        table: RunningRequests,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
    ) -> InputBatch:
        if num_reqs_padded is None and self._draw.random() < 0.5:
            num_reqs, num_tokens = len(batch.rows), int(batch.num_tokens.sum())
            room = self._limits.max_num_batched_tokens - num_tokens
            num_more = self._draw.randint(0, min(self._limits.max_num_reqs - num_reqs, room))
            num_reqs_padded, num_tokens_padded = num_reqs + num_more, num_tokens + num_more
        return self._inner.pack(batch, table, num_reqs_padded, num_tokens_padded)
