"""The device's half of a step: tables, metadata, model and choice; it knows no queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bt_builders import CommonAttentionMetadata, MambaMetadataBuilder, init_attention
from bt_runner.batch import BatchBuffers, assemble
from bt_runner.graphs import (
    Capture,
    GraphOptions,
    GraphSize,
    Work,
    fitting_size,
    graph_sizes,
    stand_ins,
)
from bt_runner.guard import TableGuard
from bt_runner.models.cache_groups import CacheOptions, cache_groups
from bt_runner.models.caches import Caches
from bt_runner.models.config import ModelConfig
from bt_runner.models.paged_model import PagedModel
from bt_runner.models.sharding import Ranks, Sharding, require_one_plan
from bt_runner.models.step import GroupStep, ModelStep
from bt_runner.models.weights import Weights, require_weights
from bt_runner.observer import Recorder
from bt_runner.rows import pool_sizes
from bt_runner.sampling import choose_tokens, keep_tokens, plan_choices
from bt_runner.staging import stage_plan
from bt_runner.step_plan import Scheduled, StepPlan
from bt_tables import StagedBlockTables
from bt_width import ServingLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUnderWay:
    """A step that was launched and that nobody has waited for yet.

    Attributes:
        step: Its number.
        scheduled: Its batch.
        commons: What the builders of each group were given.
        layer_outputs: The residual stream after each layer, ``[T, hidden]`` each; a graph's
            hold until it is replayed.
        logits: ``[S, vocab]``, request by request as many as each has choices.
        chosen: ``[S]`` int64, the tokens chosen.
    """

    step: int
    scheduled: Sequence[Scheduled]
    commons: list[CommonAttentionMetadata]
    layer_outputs: list[Tensor]
    logits: Tensor
    chosen: Tensor


class ModelRunner:
    """Runs planned steps on one device.

    Attributes:
        groups: The model's cache groups.
        layouts: Their plans.
        num_blocks: Blocks of each group, the null block included.
        caches: Their memory.
        vocab_size: Tokens the model knows.
        recorder: What observes the steps, or None.
        guard: What checks the tables of every step, or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        limits: ServingLimits,
        *,
        options: CacheOptions,
        num_blocks: int | Sequence[int] | None,
        parallel: Ranks,
        graphs: GraphOptions,
    ) -> None:
        """Plan the groups, make tables, builders, caches and the model, and capture steps."""
        require_weights(config, weights)
        embedding = weights[config.names.embedding]
        self._device, self._dtype = embedding.device, embedding.dtype
        self._limits, self.vocab_size = limits, config.vocab_size
        self.recorder: Recorder | None = None
        self.guard: TableGuard | None = None
        self.groups = cache_groups(config, options)
        setup = init_attention([group.attention for group in self.groups], limits, self._device)
        self.layouts = setup.layouts
        require_one_plan(parallel, self.layouts)
        self._builders = [per_ubatch[0] for per_ubatch in setup.builders]
        self.num_blocks = pool_sizes(self.layouts, num_blocks)
        self._tables = StagedBlockTables(
            self.layouts, device=self._device, num_blocks=self.num_blocks
        )
        self._buffers = BatchBuffers(limits, self._device)
        self.caches = Caches(self.groups, self.layouts, self.num_blocks, self._dtype, self._device)
        sharding = Sharding(parallel, limits.context_parallel.interleave)
        self._model = PagedModel(config, weights, self.caches, sharding)
        sizes = graph_sizes(graphs.batch_sizes, limits, setup.cudagraph_support)
        self._graphs = {size: self._capture(size, graphs.capture) for size in sizes}

    def stage(self, plan: StepPlan) -> None:
        """Stage what a plan changes in the rows."""
        stage_plan(self._tables, plan)

    def forget_tables(self) -> None:
        """Take nothing on the device for granted: a step broke off."""
        self._tables.invalidate()

    @torch.inference_mode()
    def launch(self, step: int, scheduled: Sequence[Scheduled]) -> StepUnderWay:
        """Let the device compute a batch whose rows are staged, and do not wait for it.

        Args:
            step: The step's number, for the recorder.
            scheduled: The batch, of which every token is known by now.
        """
        size = fitting_size(scheduled, self._graphs)
        # everything that is copied there goes first: a copy waits for what was launched before
        commons, model_step = self._prepare(scheduled, size)
        choices = plan_choices(scheduled, self.vocab_size, self._device)
        compute = self._graphs[size] if size else partial(self._model.forward, model_step)
        layer_outputs = compute()
        logits = self._model.logits(layer_outputs[-1][choices.rows])
        return StepUnderWay(
            step=step,
            scheduled=scheduled,
            commons=commons,
            layer_outputs=layer_outputs,
            logits=logits,
            chosen=choose_tokens(logits, choices.draws),
        )

    def wait(self, under_way: StepUnderWay) -> list[list[int]]:
        """Wait for a step, and let the recorder see it.

        Returns:
            The tokens each request keeps: agreed drafts and one chosen after them; none in
            the midst of a prompt.
        """
        chosen = under_way.chosen.tolist()
        if self.recorder is not None:
            self.recorder.record(
                under_way.step, under_way.scheduled, under_way.layer_outputs, under_way.logits
            )
        return keep_tokens(under_way.scheduled, chosen)

    def _prepare(
        self, scheduled: Sequence[Scheduled], size: GraphSize | None
    ) -> tuple[list[CommonAttentionMetadata], ModelStep]:
        """Update the tables and build all metadata, padded to ``size``."""
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
        longest = self._limits.max_model_len if size else None
        commons = batch.for_builders(self.layouts, tables, longest)
        groups = {
            group.name: GroupStep(common, [builder.build(common) for builder in builders])
            for group, builders, common in zip(self.groups, self._builders, commons, strict=True)
        }
        return commons, ModelStep(
            token_ids=batch.token_ids,
            positions=batch.positions,
            owners=batch.request_of_token,
            groups=groups,
            dtype=self._dtype,
        )

    @torch.inference_mode()
    def _capture(self, size: GraphSize, capture: Capture) -> Work:
        _, step = self._prepare(stand_ins(size), size)
        return capture(partial(self._model.forward, step))

    @torch.inference_mode()
    def settle(self, under_way: StepUnderWay, kept: Sequence[Sequence[int]]) -> None:
        """Copy states to where the next step looks for them, now that drafts are decided."""
        scheduled, commons = under_way.scheduled, under_way.commons
        counts = [max(len(tokens), 1) for tokens in kept]
        counts += [1] * (commons[0].num_reqs - len(counts))  # padding
        if any(part.drafts for part in scheduled):
            accepted = torch.tensor(counts, dtype=torch.int32).to(self._device)
            for group, builders, common in zip(self.groups, self._builders, commons, strict=True):
                for builder in builders:
                    if isinstance(builder, MambaMetadataBuilder):
                        settled = builder.settle(common, accepted)
                        self.caches.copy(group, settled.source_ids, settled.target_ids)
                        counts = settled.num_accepted_tokens.tolist()
        for part, count in zip(scheduled, counts, strict=False):
            part.request.num_accepted = count
