"""The device's half of a step: the model run over prepared inputs, and its choice taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bt_builders import CommonAttentionMetadata, MambaMetadataBuilder, init_attention
from bt_runner.execution.graphs import (
    Capture,
    GraphOptions,
    GraphSize,
    Work,
    fitting_size,
    graph_sizes,
    stand_ins,
)
from bt_runner.execution.observer import Recorder
from bt_runner.execution.sampling import choose_tokens, keep_tokens, plan_choices
from bt_runner.execution.step_inputs import StepPreparation
from bt_runner.models.cache.cache_groups import CacheOptions, cache_groups
from bt_runner.models.cache.caches import Caches
from bt_runner.models.config import ModelConfig
from bt_runner.models.paged_model import PagedModel
from bt_runner.models.sharding import Ranks, Sharding, require_one_plan
from bt_runner.models.weights import Weights, require_weights
from bt_runner.scheduling.pool_sizes import pool_sizes
from bt_runner.scheduling.step_plan import Scheduled
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
        preparation: Their tables and builders.
        num_blocks: Blocks of each group, the null block included.
        caches: Their memory.
        vocab_size: Tokens the model knows.
        recorder: What observes the steps, or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        limits: ServingLimits,
        *,
        options: CacheOptions,
        num_blocks: int | Sequence[int] | None,
        ranks: Ranks,
        graphs: GraphOptions,
    ) -> None:
        """Plan the groups, make tables, builders, caches and the model, and capture steps.

        Raises:
            BadInputError: Weights, pools, ranks or graphs do not fit the model or the limits.
            BlockTableError: No plan serves the limits with caches cut that way.
        """
        require_weights(config, weights)
        embedding = weights[config.names.embedding]
        device, dtype = embedding.device, embedding.dtype
        self._device = device
        self.vocab_size = config.vocab_size
        self.recorder: Recorder | None = None
        self.groups = cache_groups(config, options)
        setup = init_attention([group.attention for group in self.groups], limits, device)
        require_one_plan(ranks, setup.layouts)
        self.num_blocks = pool_sizes(setup.layouts, num_blocks)
        names = [group.name for group in self.groups]
        self.preparation = StepPreparation(names, setup, self.num_blocks, limits, device, dtype)
        self.caches = Caches(self.groups, setup.layouts, self.num_blocks, dtype, device)
        sharding = Sharding(ranks, limits.context_parallel.interleave)
        self._model = PagedModel(config, weights, self.caches, sharding)
        sizes = graph_sizes(graphs.batch_sizes, limits, setup.cudagraph_support)
        self._graphs = {size: self._capture(size, graphs.capture) for size in sizes}

    @torch.inference_mode()
    def launch(self, step: int, scheduled: Sequence[Scheduled]) -> StepUnderWay:
        """Let the device compute a batch whose rows are staged, and do not wait for it.

        Args:
            step: The step's number, for the recorder.
            scheduled: The batch, of which every token is known by now.
        """
        size = fitting_size(scheduled, self._graphs)
        # everything that is copied there goes first: a copy waits for what was launched before
        inputs = self.preparation.prepare(scheduled, size)
        choices = plan_choices(scheduled, self.vocab_size, self._device)
        compute = self._graphs[size] if size else partial(self._model.forward, inputs.step)
        layer_outputs = compute()
        logits = self._model.logits(layer_outputs[-1][choices.rows])
        return StepUnderWay(
            step=step,
            scheduled=scheduled,
            commons=inputs.commons,
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

    @torch.inference_mode()
    def settle(self, under_way: StepUnderWay, kept: Sequence[Sequence[int]]) -> None:
        """Copy states to where the next step looks for them, now that drafts are decided."""
        scheduled, commons = under_way.scheduled, under_way.commons
        counts = [max(len(tokens), 1) for tokens in kept]
        counts += [1] * (commons[0].num_reqs - len(counts))  # padding
        if any(part.drafts for part in scheduled):
            accepted = torch.tensor(counts, dtype=torch.int32).to(self._device)
            for group, builders, common in zip(
                self.groups, self.preparation.builders, commons, strict=True
            ):
                for builder in builders:
                    if isinstance(builder, MambaMetadataBuilder):
                        settled = builder.settle(common, accepted)
                        self.caches.copy(group, settled.source_ids, settled.target_ids)
                        counts = settled.num_accepted_tokens.tolist()
        for part, count in zip(scheduled, counts, strict=False):
            part.request.num_accepted = count

    @torch.inference_mode()
    def _capture(self, size: GraphSize, capture: Capture) -> Work:
        inputs = self.preparation.prepare(stand_ins(size), size)
        return capture(partial(self._model.forward, inputs.step))
