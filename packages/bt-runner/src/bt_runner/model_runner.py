"""The device's half of a step: tables, metadata, model and choice; it knows no queue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bt_builders import CommonAttentionMetadata, MambaMetadataBuilder, init_attention
from bt_runner.batch import BatchArrays, assemble
from bt_runner.errors import BadInputError
from bt_runner.models.cache_groups import CacheOptions, cache_groups
from bt_runner.models.caches import Caches
from bt_runner.models.config import ModelConfig
from bt_runner.models.paged_model import PagedModel
from bt_runner.models.sharding import Alone, Ranks, Sharding
from bt_runner.models.step import GroupStep, ModelStep
from bt_runner.models.weights import Weights
from bt_runner.observer import Recorder
from bt_runner.request import SamplingParams
from bt_runner.sampling import choose_tokens, verify_drafts
from bt_runner.staging import stage_plan
from bt_runner.step_plan import Scheduled, StepPlan
from bt_tables import StagedBlockTables
from bt_width import BlockTableLayout, ContextParallel, ServingLimits


class ModelRunner:
    """Runs planned steps on one device.

    Attributes:
        groups: The model's cache groups.
        layouts: Their plans.
        num_blocks: Blocks of each group, the null block included.
        caches: Their memory.
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
        batch_sizes: Sequence[int] = (),
        ranks: Ranks | None = None,
    ) -> None:
        """Plan the groups, then make tables, builders, caches and the model."""
        embedding = weights[config.names.embedding]
        self._device, self._dtype = embedding.device, embedding.dtype
        self.groups = cache_groups(config, options)
        setup = init_attention([group.attention for group in self.groups], limits, self._device)
        self.layouts = setup.layouts
        ranks = ranks or Alone()
        _require_one_plan(ranks, limits.context_parallel, self.layouts)
        self._builders = [per_ubatch[0] for per_ubatch in setup.builders]
        self.num_blocks = self._pool_sizes(limits, num_blocks)
        self._tables = StagedBlockTables(
            self.layouts, device=self._device, num_blocks=self.num_blocks
        )
        self.caches = Caches(self.groups, self.layouts, self.num_blocks, self._dtype, self._device)
        self._model = PagedModel(
            config, weights, self.caches, Sharding(ranks, limits.context_parallel.interleave)
        )
        self._limits = limits
        self._batch_sizes = sorted(batch_sizes)
        self.recorder: Recorder | None = None

    def stage(self, plan: StepPlan) -> None:
        """Stage what a plan changes in the rows."""
        stage_plan(self._tables, plan)

    def forget_tables(self) -> None:
        """Take nothing on the device for granted: a step broke off."""
        self._tables.invalidate()

    @torch.inference_mode()
    def run(self, step: int, scheduled: Sequence[Scheduled]) -> list[list[int]]:
        """Compute a batch whose rows are staged.

        Args:
            step: The step's number, for the recorder.
            scheduled: The batch.

        Returns:
            The tokens each request keeps: agreed drafts and one chosen after them; none in
            the midst of a prompt.
        """
        size = self._padded_size(scheduled)
        num_tokens = sum(len(part.token_ids) for part in scheduled)
        num_tokens += (size - len(scheduled)) * len(scheduled[0].token_ids)
        batch = assemble(
            scheduled, self._device, num_reqs_padded=size, num_tokens_padded=num_tokens
        )
        tables = self._tables.step(batch.for_tables())
        commons = batch.for_builders(self.layouts, tables)
        layer_outputs = self._model.forward(self._model_step(batch, commons))
        logits = self._model.logits(layer_outputs[-1][self._choice_rows(scheduled)])
        if self.recorder is not None:
            self.recorder.record(step, scheduled, layer_outputs, logits)
        kept = _choose(scheduled, logits)
        self._settle(scheduled, commons, kept)
        return kept

    def _padded_size(self, scheduled: Sequence[Scheduled]) -> int:
        """Return the batch size that a uniform decode step is padded to, or its own."""
        size = len(scheduled)
        query_len = len(scheduled[0].token_ids)
        if any(part.is_prefilling or len(part.token_ids) != query_len for part in scheduled):
            return size
        most = min(self._limits.max_num_reqs, self._limits.max_num_batched_tokens // query_len)
        return next((larger for larger in self._batch_sizes if size <= larger <= most), size)

    def _model_step(
        self, batch: BatchArrays, commons: Sequence[CommonAttentionMetadata]
    ) -> ModelStep:
        groups = {
            group.name: GroupStep(common, [builder.build(common) for builder in builders])
            for group, builders, common in zip(self.groups, self._builders, commons, strict=True)
        }
        return ModelStep(
            token_ids=batch.token_ids,
            positions=batch.positions,
            owners=batch.request_of_token,
            groups=groups,
            dtype=self._dtype,
        )

    def _choice_rows(self, scheduled: Sequence[Scheduled]) -> Tensor:
        rows: list[int] = []
        end = 0
        for part in scheduled:
            end += len(part.token_ids)
            rows += range(end - part.num_choices, end)
        return torch.tensor(rows, dtype=torch.int64).to(self._device)

    def _settle(
        self,
        scheduled: Sequence[Scheduled],
        commons: Sequence[CommonAttentionMetadata],
        kept: Sequence[Sequence[int]],
    ) -> None:
        """Copy states to where the next step looks for them, now that drafts are decided."""
        counts = [max(len(tokens), 1) for tokens in kept]
        counts += [1] * (commons[0].num_reqs - len(counts))
        if any(part.num_drafts for part in scheduled):
            accepted = torch.tensor(counts, dtype=torch.int32).to(self._device)
            for group, builders, common in zip(self.groups, self._builders, commons, strict=True):
                for builder in builders:
                    if isinstance(builder, MambaMetadataBuilder):
                        settled = builder.settle(common, accepted)
                        self.caches.copy(group, settled.source_ids, settled.target_ids)
                        counts = settled.num_accepted_tokens.tolist()
        for part, count in zip(scheduled, counts, strict=False):
            part.request.num_accepted = count

    def _pool_sizes(
        self, limits: ServingLimits, num_blocks: int | Sequence[int] | None
    ) -> tuple[int, ...]:
        if isinstance(num_blocks, int):
            return (num_blocks,) * len(self.layouts)
        if num_blocks is not None:
            return tuple(num_blocks)
        in_flight = limits.max_num_batched_tokens
        return tuple(
            1 + limits.max_num_reqs * layout.max_resident_blocks(in_flight)
            for layout in self.layouts
        )


def _require_one_plan(
    ranks: Ranks, context: ContextParallel, layouts: Sequence[BlockTableLayout]
) -> None:
    """Refuse ranks that are not those of the limits, or that planned other tables."""
    if (ranks.size, ranks.rank) != (context.size, context.rank):
        raise BadInputError(
            f"the limits are those of rank {context.rank} of {context.size}, and this is rank "
            f"{ranks.rank} of {ranks.size}",
            context_parallel=context,
        )
    plans = ranks.gather_texts("".join(layout.digest() for layout in layouts))
    if len(set(plans)) > 1:
        reasons = ranks.gather_texts("; ".join(layout.explain() for layout in layouts))
        told = " | ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons))
        raise BadInputError(f"the ranks planned different tables: {told}", digests=plans)


def _choose(scheduled: Sequence[Scheduled], logits: Tensor) -> list[list[int]]:
    params: list[SamplingParams] = []
    positions: list[int] = []
    for part in scheduled:
        params += [part.request.params] * part.num_choices
        positions += range(part.seq_len - part.num_choices + 1, part.seq_len + 1)
    chosen = choose_tokens(logits, params, positions)
    kept, start = [], 0
    for part in scheduled:
        kept.append(verify_drafts(part.drafts, chosen[start : start + part.num_choices]))
        start += part.num_choices
    return kept
