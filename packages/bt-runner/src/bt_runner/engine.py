"""The decode loop: plan, update the tables once, build metadata, run the model, choose, account."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bt_builders import CommonAttentionMetadata, init_attention
from bt_runner.batch import assemble
from bt_runner.block_pool import BlockPool
from bt_runner.drafters import Drafter
from bt_runner.errors import BadInputError, RunnerError
from bt_runner.models.cache_groups import CacheOptions, cache_groups
from bt_runner.models.caches import Caches
from bt_runner.models.config import ModelConfig
from bt_runner.models.paged_model import PagedModel
from bt_runner.models.step import GroupStep, ModelStep
from bt_runner.models.weights import Weights
from bt_runner.observer import Recorder
from bt_runner.request import FinishReason, Request, SamplingParams
from bt_runner.rows import RequestRows
from bt_runner.sampling import choose_tokens, verify_drafts
from bt_runner.scheduler import Scheduled, Scheduler, StepPlan
from bt_runner.staging import stage_plan
from bt_tables import StagedBlockTables
from bt_width import ServingLimits


class StepOutput(NamedTuple):
    """What one step gave one request.

    Attributes:
        request_id: The request.
        new_tokens: Tokens chosen for it.
        finish_reason: Why it ended, or None.
    """

    request_id: str
    new_tokens: list[int]
    finish_reason: FinishReason | None


class Engine:
    """Runs requests through a model, all cached state in blocks.

    Add requests at any time, then call ``step`` until ``has_work`` is false, or let
    ``generate`` do it.

    Attributes:
        groups: The model's cache groups.
        layouts: Their plans.
        caches: Their memory.
        num_steps: Steps launched.
        recorder: What observes the steps, or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        limits: ServingLimits,
        *,
        options: CacheOptions | None = None,
        num_blocks: int | Sequence[int] | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Plan the groups, then make tables, builders, caches and the model.

        Args:
            config: The model.
            weights: Its tensors; their dtype and device are the engine's.
            limits: What is served.
            options: How the caches are cut.
            num_blocks: Blocks of each group's pool, the null block included; by default
                enough for ``max_num_reqs`` of the longest requests.
            drafter: What guesses tokens ahead; ``limits`` says how many.
        """
        embedding = weights[config.names.embedding]
        self._device, self._dtype = embedding.device, embedding.dtype
        self.groups = cache_groups(config, options or CacheOptions())
        setup = init_attention([group.attention for group in self.groups], limits, self._device)
        self.layouts = setup.layouts
        self._builders = [per_ubatch[0] for per_ubatch in setup.builders]
        pool_sizes = self._pool_sizes(limits, num_blocks)
        self._rows = RequestRows(self.layouts, pool_sizes)
        self._tables = StagedBlockTables(self.layouts, device=self._device, num_blocks=pool_sizes)
        self.caches = Caches(self.groups, self.layouts, pool_sizes, self._dtype, self._device)
        self._model = PagedModel(config, weights, self.caches)
        self._scheduler = Scheduler(limits, self._rows)
        self._limits = limits
        self._drafter = drafter
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self.num_steps = 0
        self.recorder: Recorder | None = None

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The pool of each group."""
        return self._rows.pools

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    def new_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Request:
        """Return a request that fits; nothing is changed.

        Raises:
            RequestRefusedError: It could never finish; the message has the numbers.
            BadInputError: Its name is in use.
        """
        name = f"request-{self._num_added}" if request_id is None else request_id
        if name in self._requests:
            raise BadInputError(f"there is a request {name!r} already", request_id=name)
        request = Request(
            request_id=name,
            prompt_len=len(prompt),
            params=params or SamplingParams(),
            tokens=list(prompt),
        )
        self._scheduler.require_fit(request)
        return request

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Request:
        """Let a new request wait for its turn; it raises what ``new_request`` does."""
        request = self.new_request(prompt, params, request_id=request_id)
        self._scheduler.add(request)
        self._requests[request.request_id] = request
        self._num_added += 1
        return request

    def abort(self, request_id: str) -> None:
        """End a request early and give its blocks back."""
        request = self._requests.pop(request_id)
        request.finish_reason = FinishReason.ABORTED
        self._scheduler.finish(request, self.num_steps)

    def generate(
        self, prompts: Iterable[Sequence[int]], params: SamplingParams | None = None
    ) -> Iterator[StepOutput]:
        """Run prompts to their end, giving tokens as they come, step by step."""
        for prompt in prompts:
            self.add_request(prompt, params)
        while self.has_work:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Compute one batch and choose tokens for those of its requests that are due one."""
        plan = self._scheduler.schedule(last_step=self.num_steps)
        if not plan.scheduled:
            if self.has_work:
                raise RunnerError("no request can be computed, and none is under way")
            return []
        self.num_steps += 1
        logits = self._run(plan)
        chosen = self._choose(plan, logits)
        self._rows.complete(self.num_steps)
        return self._account(plan, chosen)

    def _run(self, plan: StepPlan) -> Tensor:
        """Return the logits ``[S, vocab]`` of all positions that a token is chosen after."""
        stage_plan(self._tables, plan)
        batch = assemble(plan.scheduled, self._device)
        tables = self._tables.step(batch.for_tables())
        commons = batch.for_builders(self.layouts, tables)
        step = ModelStep(
            token_ids=batch.token_ids,
            positions=batch.positions,
            owners=batch.request_of_token,
            groups=self._build_metadata(commons),
            dtype=self._dtype,
        )
        layer_outputs = self._model.forward(step)
        logits = self._model.logits(layer_outputs[-1][self._choice_rows(plan)])
        if self.recorder is not None:
            self.recorder.record(self.num_steps, plan.scheduled, layer_outputs, logits)
        return logits

    def _build_metadata(self, commons: Sequence[CommonAttentionMetadata]) -> dict[str, GroupStep]:
        return {
            group.name: GroupStep(common, [builder.build(common) for builder in builders])
            for group, builders, common in zip(self.groups, self._builders, commons, strict=True)
        }

    def _choice_rows(self, plan: StepPlan) -> Tensor:
        rows: list[int] = []
        end = 0
        for part in plan.scheduled:
            end += len(part.token_ids)
            rows += range(end - part.num_choices, end)
        return torch.tensor(rows, dtype=torch.int64).to(self._device)

    @staticmethod
    def _choose(plan: StepPlan, logits: Tensor) -> list[int]:
        params: list[SamplingParams] = []
        positions: list[int] = []
        for part in plan.scheduled:
            params += [part.request.params] * part.num_choices
            positions += range(part.seq_len - part.num_choices + 1, part.seq_len + 1)
        return choose_tokens(logits, params, positions)

    def _account(self, plan: StepPlan, chosen: list[int]) -> list[StepOutput]:
        outputs = []
        next_choice = 0
        for part in plan.scheduled:
            ours = chosen[next_choice : next_choice + part.num_choices]
            next_choice += part.num_choices
            outputs += self._account_one(part, ours)
        return outputs

    def _account_one(self, part: Scheduled, chosen: list[int]) -> list[StepOutput]:
        request = part.request
        if not chosen:
            self._scheduler.advance(request, part.seq_len, self.num_steps)
            return []
        kept = verify_drafts(part.token_ids[len(part.token_ids) - part.num_drafts :], chosen)
        taken = request.accept(kept)
        if request.finish_reason is not None:
            del self._requests[request.request_id]
            self._scheduler.finish(request, self.num_steps)
        else:
            request.num_accepted = len(kept)
            num_rejected = part.num_drafts - (len(kept) - 1)
            self._scheduler.advance(request, part.seq_len - num_rejected, self.num_steps)
            self._draft(request)
        return [StepOutput(request.request_id, taken, request.finish_reason)]

    def _draft(self, request: Request) -> None:
        if self._drafter is not None:
            request.drafts = list(
                self._drafter.propose(request.tokens, self._limits.num_speculative_tokens)
            )

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
