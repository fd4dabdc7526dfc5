"""vLLM's two model runners on the CPU, without a model, a sampler or a drafter.

Each follows the scheduler and prepares its batch as vLLM does; what is sampled and accepted is
told to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.cpu_model_runner import _torch_cuda_wrapper
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu import model_runner as gpu_model_runner_v2
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.states import RequestState

CPU = torch.device("cpu")

Damage = Callable[[Sequence[torch.Tensor], Any, Any], None]
"""Called with a step's tables, slots and batch before anybody checks them."""


@dataclass
class PreparedBatch:
    """A batch as it goes to the model.

    Attributes:
        req_ids: [N] the requests in batch order.
        seq_lens: [N or more] their tokens, those of the step included.
        query_start_loc: [N + 1 or more].
        samples: [N] whether a token is sampled after the request's last one.
    """

    req_ids: list[str]
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    samples: list[bool]

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


class PlainBuffer:
    """Memory that host and device share, where the device is the host."""

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> torch.Tensor:
        return self.cpu if n is None else self.cpu[:n]


buffer_utils.UvaBuffer = PlainBuffer
buffer_utils.is_uva_available = lambda: True


def _with_bool_masks(name: str, place: int) -> None:
    """Let the interpreter take masks that ``~`` has made numbers of."""
    original = getattr(InterpreterBuilder, name)

    def operation(self: Any, *arguments: Any) -> Any:
        mask = arguments[place]
        if mask.data.dtype != np.bool_:
            mask.data = mask.data.astype(np.bool_)
        return original(self, *arguments)

    setattr(InterpreterBuilder, name, operation)


_with_bool_masks("create_masked_load", 1)
_with_bool_masks("create_masked_store", 2)


class RunnerV2(gpu_model_runner_v2.GPUModelRunner):
    """MRV2's runner: its request states, tables and kernels; the batch is put together here."""

    def __init__(self, config: VllmConfig, *, shards: int, rank: int) -> None:
        self.vllm_config = config
        self.device = CPU
        self.max_model_len = config.model_config.max_model_len
        self.max_num_reqs = config.scheduler_config.max_num_seqs
        self.max_num_tokens = config.scheduler_config.max_num_batched_tokens
        self.is_encoder_decoder = False
        self.dcp_size, self.dcp_rank, self.cp_interleave = shards, rank, 1
        for name in (
            *("pcp_manager", "pooling_runner", "pp_handler", "encoder_cache", "sampler"),
            *("prompt_logprobs_worker", "adaptive_verification", "speculator"),
        ):
            setattr(self, name, None)
        ignore = lambda *args, **kwargs: None  # noqa: E731
        self.model_state = SimpleNamespace(
            add_request=ignore, remove_request=ignore, apply_staged_writes=ignore
        )
        self.lora_state = SimpleNamespace(add_request=ignore, remove_request=ignore)
        self.kv_block_zeroer = SimpleNamespace(zero_block_ids=ignore)
        self.is_last_pp_rank = False
        self.kv_caches: list[torch.Tensor] = []
        self.attn_groups: list[Any] = []
        self.req_states = RequestState(
            self.max_num_reqs,
            self.max_model_len,
            self.max_num_tokens,
            config.num_speculative_tokens,
            config.model_config.get_vocab_size(),
            CPU,
        )
        self.damage: Damage | None = None
        self._batch: Any = None

    def initialize_kv_cache(self, kv_cache_config: Any, width_error: int = 0) -> None:
        """Make the tables by vLLM's own widths; ``width_error`` is added to the first."""
        self.kv_cache_config = kv_cache_config
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        widths = [
            get_block_table_width(
                spec.max_num_blocks_per_req(self.vllm_config, self.max_model_len),
                spec.block_size,
                token_alignment=spec.block_table_token_alignment,
            )
            for spec in specs
        ]
        widths[0] += width_error
        self.block_tables = BlockTables(
            block_sizes=[spec.block_size for spec in specs],
            max_num_reqs=self.max_num_reqs,
            max_num_batched_tokens=self.max_num_tokens,
            max_num_blocks_per_group=widths,
            device=CPU,
            cp_size=self.dcp_size,
            cp_rank=self.dcp_rank,
            cp_interleave=self.cp_interleave,
            slot_mapping_enabled=[not isinstance(spec, MambaSpec) for spec in specs],
            dcp_sharded=[spec.dcp_sharded for spec in specs],
            sliding_window_reach=[
                spec.num_retained_tokens if isinstance(spec, SlidingWindowSpec) else 0
                for spec in specs
            ],
        )
        # all bits or none: the interpreter's ``~`` of a loaded bool is that of an int
        self.block_tables.dcp_sharded = -self.block_tables.dcp_sharded.to(torch.int8)

    def execute_model(self, scheduler_output: Any) -> PreparedBatch | None:
        """Follow the scheduler, prepare a batch and its tables, and compute nothing."""
        self.finish_requests(scheduler_output)
        self.add_requests(scheduler_output)
        self.update_requests(scheduler_output)
        self.block_tables.apply_staged_writes()
        if not scheduler_output.total_num_scheduled_tokens:
            return None
        self._batch = batch = self._gathered(scheduler_output.num_scheduled_tokens)
        self.prepare_attn(batch)
        prompts = self.req_states.prefill_len.np[batch.idx_mapping.numpy()]
        samples: list[bool] = (batch.seq_lens.numpy() >= prompts).tolist()
        return PreparedBatch(batch.req_ids, batch.seq_lens, batch.query_start_loc, samples)

    def prepare_attn(self, input_batch: Any) -> Any:
        """Prepare tables and slots, and damage them where a test asks for it."""
        tables, slots = super().prepare_attn(input_batch)
        if self.damage is not None:
            self.damage(tables, slots, input_batch)
        return tables, slots

    def take_sampled(
        self, scheduler_output: Any, sampled: Sequence[list[int]], rejected: Sequence[int]
    ) -> None:
        """Count the tokens of the step that stay."""
        rows = self._batch.idx_mapping
        added = self._batch.queries - torch.tensor(rejected)
        self.req_states.num_computed_tokens.gpu[rows] += added.int()

    def _gathered(self, scheduled: dict[str, int]) -> Any:
        names = list(scheduled)
        rows = np.array([self.req_states.req_id_to_index[name] for name in names])
        idx_mapping = torch.from_numpy(rows)
        queries = torch.tensor([scheduled[name] for name in names])
        computed = self.req_states.num_computed_tokens.gpu[idx_mapping]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]).int()
        tokens = int(starts[-1])
        padded = min(tokens + 3, self.max_num_tokens)
        positions = torch.zeros(padded, dtype=torch.int64)
        positions[:tokens] = torch.cat(
            [
                torch.arange(first, first + count)
                for first, count in zip(computed, queries, strict=True)
            ]
        )
        return SimpleNamespace(
            req_ids=names,
            num_reqs=len(names),
            num_reqs_after_padding=min(len(names) + 1, self.max_num_reqs),
            num_tokens_after_padding=padded,
            idx_mapping=idx_mapping,
            queries=queries,
            query_start_loc=starts,
            positions=positions,
            seq_lens=(computed + queries).int(),
        )


class RunnerV1(gpu_model_runner.GPUModelRunner):
    """MRV1's runner: made, batched and prepared by its own code."""

    def __init__(self, config: VllmConfig, *, shards: int, rank: int) -> None:
        group = SimpleNamespace(
            is_first_rank=True, is_last_rank=True, world_size=shards, rank_in_group=rank
        )
        parallel_state._PP = parallel_state._DCP = group
        is_async = config.scheduler_config.async_scheduling
        # its streams and events have no place on a CPU
        config.scheduler_config.async_scheduling = False
        with set_current_vllm_config(config), _torch_cuda_wrapper():
            super().__init__(config, CPU)
        config.scheduler_config.async_scheduling = is_async
        self.use_async_scheduling = is_async
        self.use_async_spec_decode = is_async and config.num_speculative_tokens > 0
        self.damage: Damage | None = None
        self._valid_counts: list[int] = []

    def initialize_kv_cache(self, kv_cache_config: Any, width_error: int = 0) -> None:
        """Make the tables by vLLM's own widths; ``width_error`` is added to the first."""
        self.kv_cache_config = kv_cache_config
        self.attn_groups: list[Any] = [[] for _ in kv_cache_config.kv_cache_groups]
        # so that the batch is reordered, as most backends want it
        self.reorder_batch_threshold = 1 + self.num_spec_tokens
        self.may_reinitialize_input_batch(kv_cache_config)
        table = self.input_batch.block_table[0]
        if width_error:
            width = table.max_num_blocks_per_req + width_error
            table.block_table = table._make_buffer(self.max_num_reqs, width, dtype=torch.int32)

    def execute_model(self, scheduler_output: Any) -> PreparedBatch | None:
        """Follow the scheduler, prepare a batch and its tables, and compute nothing."""
        correct = self._update_states(scheduler_output)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if not num_tokens:
            return None
        names = self.input_batch.req_ids.copy()
        queries = np.array(
            [scheduler_output.num_scheduled_tokens[name] for name in names], dtype=np.int32
        )
        self._prepare_inputs(scheduler_output, queries)
        padded = min(num_tokens + 3, self.max_num_tokens)
        num_reqs_padded = min(len(names) + 1, self.max_num_reqs)
        slots, _ = self._get_slot_mappings(
            num_tokens_padded=padded,
            num_reqs_padded=num_reqs_padded,
            num_tokens_unpadded=num_tokens,
        )
        self._build_attention_metadata(
            num_tokens=num_tokens,
            num_tokens_padded=padded,
            num_reqs=len(names),
            num_reqs_padded=num_reqs_padded,
            max_query_len=int(queries.max()),
            num_scheduled_tokens=scheduler_output.num_scheduled_tokens,
            slot_mappings=slots,
        )
        if correct is not None:
            correct()
        return self._prepared()

    def _prepared(self) -> PreparedBatch:
        names = self.input_batch.req_ids.copy()
        samples = ~self.discard_request_mask.np[: len(names)]
        return PreparedBatch(names, self.seq_lens, self.query_start_loc.gpu, samples.tolist())

    def _build_attention_metadata(self, **arguments: Any) -> Any:
        result = super()._build_attention_metadata(**arguments)
        if self.damage is not None:
            rows = arguments["num_reqs_padded"]
            tables = [
                table.get_device_tensor(rows) for table in self.input_batch.block_table.block_tables
            ]
            self.damage(tables, arguments["slot_mappings"], self._prepared())
        return result

    def take_sampled(
        self, scheduler_output: Any, sampled: Sequence[list[int]], rejected: Sequence[int]
    ) -> None:
        """Note what was sampled, by vLLM's own bookkeeping."""
        width = 1 + self.num_spec_tokens
        ids = torch.full((len(sampled), width), -1, dtype=torch.int32)
        for row, tokens in enumerate(sampled):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        if self.use_async_spec_decode:
            # what the drafter leaves behind
            self._valid_counts = [len(tokens) for tokens in sampled]
            self.valid_sampled_token_count_gpu = torch.tensor(self._valid_counts)
            self.input_batch.prev_sampled_token_ids = ids[:, :1]
        self._bookkeeping_sync(
            scheduler_output,
            SamplerOutput(sampled_token_ids=ids, logprobs_tensors=None),
            None,
            torch.zeros(scheduler_output.total_num_scheduled_tokens, 1),
            scheduler_output.total_num_scheduled_tokens,
        )

    def _get_valid_sampled_token_count(self) -> list[int]:
        return self._valid_counts

    def _prepare_input_ids(self, *arguments: Any) -> None:
        """Tokens are the model's business."""


RUNNERS: dict[str, Any] = {"MRV2": RunnerV2, "MRV1": RunnerV1}
