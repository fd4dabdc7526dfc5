"""Runs scheduled steps on one device: tables, metadata, forward or a CUDA graph, sampler.

The input batch and the tables' packet are all that a decode step sends to the device, and the
sampled tokens all that is read back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from bt_builders import (
    AttentionSetup,
    CommonAttentionMetadata,
    MambaMetadataBuilder,
)
from bt_runner.arrays import Ints, Tokens
from bt_runner.cuda_graphs import (
    Capture,
    GraphOptions,
    GraphSize,
    Work,
    fitting_size,
    graph_sizes,
)
from bt_runner.input_batch import InputBatch, InputBuffers, dummy_batch
from bt_runner.kv_cache_manager import KVCacheManager, TableEdits
from bt_runner.models.step import GroupStep, ModelStep
from bt_runner.requests import RunningRequests
from bt_runner.sampler import Sampling
from bt_runner.scheduler import SchedulerOutput
from bt_tables import BlockTableSanitizer, StagedBlockTables, StepTables
from bt_width import BlockTableLayout, ServingLimits


class StepModel(Protocol):
    """Computes a step."""

    def forward(self, step: ModelStep) -> list[Tensor]:
        """Return the residual stream after each layer, ``[T, hidden]`` each."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[S, vocab]`` for the residual stream ``hidden`` [S, hidden]."""

    def copy_blocks(self, group: int, source_ids: Tensor, target_ids: Tensor) -> None:
        """Copy blocks of all a group's caches; nothing where the target is the null block."""


class StepSampler(Protocol):
    """Chooses tokens."""

    def __call__(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """Return ``[S]`` int64 for ``logits`` [S, vocab]."""


class TableCheck(Protocol):
    """Looks at the tables of every step before a layer reads them."""

    def check(self, batch: SchedulerOutput, inputs: InputBatch, tables: StepTables) -> None:
        """Raise where something is not as it should be."""


class TableGuard:
    """Lets the sanitizer check every step, and raises at the first fault."""

    def __init__(
        self, kv: KVCacheManager, layouts: Sequence[BlockTableLayout] | None = None
    ) -> None:
        """Take the KV cache manager, and how another rank planned the tables."""
        self._kv = kv
        layouts = layouts or [group.layout for group in kv.groups]
        self._sanitizer = BlockTableSanitizer(layouts, [pool.num_blocks for pool in kv.pools])

    def check(self, batch: SchedulerOutput, inputs: InputBatch, tables: StepTables) -> None:
        """Check a step.

        Raises:
            BlockTableFaultError: It names group, request and column.
        """
        device, count = inputs.seq_lens.device, len(batch.rows)
        held = np.stack([group.held[batch.rows] for group in self._kv.groups], axis=1)
        num_tokens = int(batch.num_tokens.sum())
        self._sanitizer.check(
            tables.block_tables,
            tables.slot_mappings,
            inputs.seq_lens[:count],
            inputs.query_start_loc[: count + 1].clamp(max=num_tokens),
            num_blocks_of_row=torch.from_numpy(held.astype(np.int32)).to(device),
            ref_counts=[
                torch.from_numpy(pool.references.astype(np.int32)).to(device)
                for pool in self._kv.pools
            ],
            ref_blocks=[
                torch.from_numpy(group.blocks_of(batch.rows)).to(device)
                for group in self._kv.groups
            ],
        )


class _Prepared(NamedTuple):
    """A step's inputs, all of them on their way to the device."""

    inputs: InputBatch
    metadata: list[CommonAttentionMetadata]
    step: ModelStep


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightStep:
    """A step that was launched and not waited for yet.

    Attributes:
        step: Its number.
        batch: Its batch.
        metadata: What the builders of each group were given.
        rows: ``[N]`` int64, on the device; padding has a row of its own.
        streams: ``[layers, T, hidden]``, the residual stream after each layer, where it is
            recorded.
        logits: ``[S, vocab]``, request by request as many as each has choices.
        chosen: ``[S]`` int64 on the host, the tokens chosen, when ``event`` has come.
        event: When they are there; None where they are already.
    """

    step: int
    batch: SchedulerOutput
    metadata: list[CommonAttentionMetadata]
    rows: Tensor
    streams: Tensor | None
    logits: Tensor
    chosen: Tensor
    event: torch.cuda.Event | None

    def wait(self) -> Tokens:
        """Wait for the step and return the tokens that it chose; the only read of the device."""
        if self.event is not None:
            self.event.synchronize()
        return self.chosen.numpy().astype(np.int32)


class ModelRunner:
    """Runs scheduled steps on one device.

    Attributes:
        layouts: The groups' plans.
        inputs: The packed input batch.
        table_seconds: Host time of the last step's table update.
        builder_seconds: Host time of the last step's builders.
    """

    def __init__(
        self,
        setup: AttentionSetup,
        model: StepModel,
        sampler: StepSampler,
        *,
        tables: StagedBlockTables,
        limits: ServingLimits,
        device: torch.device,
        dtype: torch.dtype,
        graphs: GraphOptions,
        max_steps_in_flight: int,
        checks: Sequence[TableCheck] = (),
    ) -> None:
        """Make empty tables and room for the largest step, and capture steps.

        Args:
            setup: The cache groups, their plans and builders.
            model: Computes a step.
            sampler: Chooses its tokens.
            tables: The groups' tables, made from the same plans.
            limits: What is served.
            device: Where all of it lies.
            dtype: Of the model.
            graphs: Which decode steps are captured.
            max_steps_in_flight: Steps that may be launched before the first has ended.
            checks: What looks at the tables of every step.
        """
        self.layouts = setup.layouts
        self._groups = [(group.name, group.builders) for group in setup.groups]
        self._model = model
        self._sampler = sampler
        self._limits = limits
        self._device = device
        self._dtype = dtype
        self._checks = tuple(checks)
        self._tables = tables
        self.table_seconds = 0.0
        self.builder_seconds = 0.0
        self.inputs = InputBuffers(limits, device, max_steps_in_flight)
        # by row, and one more that padding reads: what the host does not know, or need not
        num_rows = limits.max_num_reqs + 1
        self._last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._num_accepted = torch.ones(num_rows, dtype=torch.int32, device=device)
        self._is_ahead = max_steps_in_flight > 1
        self._keeps_states = any(
            isinstance(builder, MambaMetadataBuilder)
            for _, builders in self._groups
            for builder in builders
        )
        self._pinned = [
            torch.zeros(limits.max_num_batched_tokens, dtype=torch.int64, pin_memory=True)
            for _ in range(max_steps_in_flight if device.type == "cuda" else 0)
        ]
        sizes = graph_sizes(graphs.batch_sizes, limits, setup.cudagraph_support)
        self._graphs: dict[GraphSize, Work] = {}
        for size in sizes:
            self._graphs[size] = self._capture(size, graphs.capture)

    def invalidate(self) -> None:
        """Mark all device rows stale after a failed step."""
        self._tables.invalidate()

    @torch.inference_mode()
    def launch(
        self,
        step: int,
        batch: SchedulerOutput,
        edits: TableEdits,
        table: RunningRequests,
        *,
        records: bool = False,
    ) -> InFlightStep:
        """Let the device compute a batch, and do not wait for it.

        Args:
            step: The step's number.
            batch: Its batch.
            edits: How rows of the tables changed since the last step.
            table: The requests that run.
            records: Whether the residual stream is kept.
        """
        began = time.perf_counter()
        edits.stage(self._tables)
        self.table_seconds = time.perf_counter() - began
        size = fitting_size(batch, self._graphs) if self._graphs else None
        inputs, metadata, model_step = self._prepare(batch, table, size, self._checks)
        compute = self._graphs[size] if size else partial(self._model.forward, model_step)
        layer_outputs = compute()
        logits = self._model.logits(layer_outputs[-1][inputs.sampling.indices])
        chosen = self._sampler(logits, inputs.sampling)
        if self._is_ahead:
            # the next step's input, before the host knows what it is
            self._last_tokens[inputs.sampling.rows] = chosen
        chosen, event = self._on_its_way(chosen, step)
        return InFlightStep(
            step=step,
            batch=batch,
            metadata=metadata,
            rows=inputs.rows,
            # a graph's are overwritten when it is replayed
            streams=torch.stack(tuple(layer_outputs)) if records else None,
            logits=logits,
            chosen=chosen,
            event=event,
        )

    @torch.inference_mode()
    def commit_drafts(self, in_flight: InFlightStep, num_kept: Ints) -> bool:
        """Copy states to where the next step looks for them, now that drafts are decided.

        Args:
            in_flight: The step, which has ended.
            num_kept: [N]; tokens of each request that stay, 1 where it has no drafts.

        Returns:
            Whether the device knows how many states' tokens stayed, and the host does not.
        """
        if not self._keeps_states or not in_flight.batch.num_drafts.any():
            return False
        num_reqs = in_flight.metadata[0].num_reqs
        counts = np.ones(num_reqs, np.int32)
        counts[: len(num_kept)] = num_kept
        accepted = torch.from_numpy(counts).to(self._device)
        for index, (_, builders) in enumerate(self._groups):
            for builder in builders:
                if isinstance(builder, MambaMetadataBuilder):
                    found = builder.commit_states(in_flight.metadata[index], accepted)
                    sources, targets = found.source_ids.flatten(), found.target_ids.flatten()
                    self._model.copy_blocks(index, sources, targets)
                    self._num_accepted[in_flight.rows] = found.num_accepted_tokens
        return True

    def _prepare(
        self,
        batch: SchedulerOutput,
        table: RunningRequests,
        size: GraphSize | None,
        checks: Sequence[TableCheck],
    ) -> _Prepared:
        """Send the inputs, update the tables and build all metadata, padded to ``size``."""
        inputs = self.inputs.pack(
            batch,
            table,
            num_reqs_padded=size and size.num_reqs,
            num_tokens_padded=size and size.num_reqs * size.query_len,
        )
        self._add_device_numbers(inputs)
        began = time.perf_counter()
        tables = self._tables.step(inputs.for_tables())
        self.table_seconds += time.perf_counter() - began
        for check in checks:
            check.check(batch, inputs, tables)
        # what is captured must do for requests of any length
        attention = inputs.for_builders(self._limits.max_model_len if size else None)
        began = time.perf_counter()
        metadata, groups = [], {}
        for index, (name, builders) in enumerate(self._groups):
            layout = self.layouts[index]
            common = CommonAttentionMetadata.from_step(layout, tables, index, attention)
            metadata.append(common)
            built = [builder.build(common) for builder in builders]
            groups[name] = GroupStep(common, built)
        self.builder_seconds = time.perf_counter() - began
        step = ModelStep(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            req_of_token=inputs.req_of_token,
            groups=groups,
            dtype=self._dtype,
        )
        return _Prepared(inputs, metadata, step)

    def _add_device_numbers(self, inputs: InputBatch) -> None:
        """Fill in what only the device knows, in place: a graph reads it there."""
        if inputs.takes_from_device:
            ids, last = inputs.token_ids, self._last_tokens[inputs.rows]
            if inputs.num_tokens > inputs.num_reqs:
                last = last[inputs.req_of_token]
            torch.where(ids < 0, last, ids, out=ids)
        if self._limits.num_speculative_tokens and self._keeps_states:
            counts, known = inputs.num_accepted_tokens, self._num_accepted[inputs.rows]
            counts.copy_(torch.where(counts > 0, counts, known))

    def _on_its_way(self, chosen: Tensor, step: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Send the chosen tokens to the host, and return where and when they arrive."""
        if not self._pinned:
            return chosen, None
        host = self._pinned[step % len(self._pinned)][: len(chosen)]
        host.copy_(chosen, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        return host, event

    @torch.inference_mode()
    def _capture(self, size: GraphSize, capture: Capture) -> Work:
        no_requests = RunningRequests(1)
        prepared = self._prepare(dummy_batch(*size), no_requests, size, ())
        return capture(partial(self._model.forward, prepared.step))
