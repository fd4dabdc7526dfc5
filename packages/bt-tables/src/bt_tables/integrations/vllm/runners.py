"""Finds the numbers and tensors of vLLM 0.33's two model runners; it knows their attributes.

MRV2 is ``vllm.v1.worker.gpu.model_runner.GPUModelRunner``, MRV1
``vllm.v1.worker.gpu_model_runner.GPUModelRunner``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bt_tables.sanitizer import SanitizerReport
from bt_width import ContextParallel, ServingLimits

from .layouts import (
    NotCheckedError,
    PlannedGroup,
    plan_groups,
    shape_findings,
    split_findings,
)
from .runner_check import RunnerCheck, RunnerStep, logger
from .settings import Settings


def make_check_v2(runner: Any, settings: Settings) -> RunnerCheck:
    """Return the checks of an MRV2 runner whose tables have been made.

    Raises:
        BlockTableFaultError: A table is not as wide as planned, and the action is "raise".
        NotCheckedError: The runner's batches cannot be checked.
    """
    if runner.pcp_manager is not None:
        raise NotCheckedError("prefill context parallelism has tables of its own")
    if runner.is_encoder_decoder:
        raise NotCheckedError("an encoder's length is part of this model's tables")
    tables = runner.block_tables.input_block_tables
    sharing = runner.dcp_size, runner.dcp_rank, runner.cp_interleave
    return _make_check(runner, sharing, tables, settings)


def step_v2(
    block_tables: Sequence[torch.Tensor], slot_mappings: torch.Tensor, batch: Any
) -> RunnerStep:
    """Return the step of an MRV2 ``InputBatch`` and the tensors made for it."""
    return RunnerStep(
        block_tables=block_tables,
        slot_mappings=list(slot_mappings),
        seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc,
        request_ids=batch.req_ids,
    )


def make_check_v1(runner: Any, settings: Settings) -> RunnerCheck:
    """Return the checks of an MRV1 runner whose tables have been made.

    Raises:
        BlockTableFaultError: A table is not as wide as planned, and the action is "raise".
        NotCheckedError: The runner's batches cannot be checked.
    """
    if runner.max_encoder_len:
        raise NotCheckedError("an encoder's length is part of this model's tables")
    tables = runner.input_batch.block_table.block_tables
    sharing = 1, 0, 1
    for table in tables:
        if table.pcp_world_size > 1:
            raise NotCheckedError("prefill context parallelism has tables of its own")
        sharing = table.dcp_world_size, table.dcp_rank, table.cp_kv_cache_interleave_size
    return _make_check(runner, sharing, [table.block_table.gpu for table in tables], settings)


def step_v1(runner: Any, num_reqs_padded: int, slots: dict[int, torch.Tensor]) -> RunnerStep:
    """Return the step that an MRV1 runner has prepared; ``slots`` are by group."""
    tables = runner.input_batch.block_table.block_tables
    num_reqs = runner.input_batch.num_reqs
    return RunnerStep(
        block_tables=[table.get_device_tensor(num_reqs_padded) for table in tables],
        # groups without a mapping have a buffer that is never written
        slot_mappings=[
            slots[at] if table.slot_mapping_mode.value != "none" else None
            for at, table in enumerate(tables)
        ],
        seq_lens=runner.seq_lens,
        query_start_loc=runner.query_start_loc.gpu,
        request_ids=runner.input_batch.req_ids[:num_reqs],
    )


def _make_check(
    runner: Any,
    sharing: tuple[int, int, int],
    tables: Sequence[torch.Tensor],
    settings: Settings,
) -> RunnerCheck:
    """Return the checks of tables shared by a number of ranks, by this one, so interleaved."""
    size, rank, interleave = sharing
    limits = ServingLimits(
        max_model_len=runner.max_model_len,
        max_num_reqs=runner.max_num_reqs,
        max_num_batched_tokens=runner.max_num_tokens,
        context_parallel=ContextParallel(
            size=size, rank=rank, interleave=interleave if size > 1 else 1
        ),
    )
    config = runner.kv_cache_config
    groups, left_out = plan_groups(config.kv_cache_groups, limits)
    for sentence in left_out:
        logger.warning("Block tables: %s.", sentence)
    check = RunnerCheck(groups, config.num_blocks, settings, rank)
    widths = [tables[group.index].shape[1] for group in groups]
    derivations = [_derivation(runner, group) for group in groups]
    findings = (
        *shape_findings(groups, widths, derivations),
        *split_findings(groups, runner.attn_groups),
    )
    if findings:
        check.act(SanitizerReport(step=0, findings=findings, num_faults=len(findings)))
    logger.info(
        "Block tables: %d of %d cache groups are checked, one step in %d.",
        len(groups),
        len(config.kv_cache_groups),
        settings.every,
    )
    return check


def _derivation(runner: Any, group: PlannedGroup) -> str:
    spec = runner.kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
    blocks = spec.max_num_blocks_per_req(runner.vllm_config, runner.max_model_len)
    alignment = spec.block_table_token_alignment
    return (
        f"vLLM: {type(spec).__name__}.max_num_blocks_per_req({runner.max_model_len}) is {blocks} "
        f"blocks of {spec.block_size} tokens, aligned to {alignment} tokens"
    )
