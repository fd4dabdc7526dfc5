"""Checks the steps of one model runner: takes its tensors, gives them to the sanitizer, acts."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bt_tables.sanitizer import BlockTableFaultError, BlockTableSanitizer, SanitizerReport
from bt_width import PAD_SLOT

from .given_blocks import GivenBlocks
from .layouts import PlannedGroup
from .settings import Settings

logger = logging.getLogger("vllm.bt_tables")
"""A child of vLLM's logger, so that its lines go where vLLM's go."""

_MAX_FINDINGS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStep:
    """What a runner is about to hand to its model.

    Attributes:
        block_tables: [groups of vLLM] [rows, W] int32 tensors of block ids.
        slot_mappings: [groups of vLLM] [tokens] int64 tensors, None where a group has no slots.
        seq_lens: [N or more] tokens of each request, those of the step included.
        query_start_loc: [N + 1 or more].
        request_ids: [N] the requests in batch order.
    """

    block_tables: Sequence[torch.Tensor]
    slot_mappings: Sequence[torch.Tensor | None]
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    request_ids: Sequence[str]


class RunnerCheck:
    """The checks of one model runner, from the making of its tables on.

    It is used by the runner's own thread alone.
    """

    def __init__(
        self, groups: Sequence[PlannedGroup], num_blocks: int, settings: Settings, rank: int
    ) -> None:
        """Plan the checks of ``groups``, whose blocks come from one pool of ``num_blocks``."""
        self._groups = tuple(groups)
        self._settings = settings
        self._rank = rank
        self._given = GivenBlocks(groups, num_blocks)
        self._sanitizer = BlockTableSanitizer(
            [group.layout for group in groups],
            [num_blocks] * len(self._groups),
            mode="report",
            max_findings=_MAX_FINDINGS,
            # vLLM leaves old ids past a row's blocks, behind windows and before states
            checks_untouched=False,
            # a request may hit a prefix that another one computes in the same step
            checks_shared_writes=False,
        )
        self._step = 0
        self._no_slots: dict[int, torch.Tensor] = {}

    def follow(self, output: Any) -> None:
        """Take over what the scheduler gave; every output, also those of steps not checked."""
        self._given.follow(output)

    def check(self, step: RunnerStep) -> None:
        """Check a step, one in ``settings.every``.

        Raises:
            BlockTableFaultError: Something is wrong, and the action is "raise".
        """
        number, self._step = self._step, self._step + 1
        names = list(step.request_ids)
        if number % self._settings.every or not self._groups or not self._given.knows(names):
            return
        num_reqs = len(names)
        holders = self._given.holders()
        report = self._sanitizer.check(
            [step.block_tables[group.index] for group in self._groups],
            [self._slots(step, group.index) for group in self._groups],
            step.seq_lens[:num_reqs],
            step.query_start_loc[: num_reqs + 1],
            num_blocks_of_row=self._given.counts(names),
            ref_counts=[holders] * len(self._groups),
            ref_blocks=self._given.rows(names),
            request_ids=names,
            edits_of=lambda row: self._given.edits_of(names[row]),
        )
        shared = tuple(self._given.written_twice(names))
        if shared:
            report = replace(
                report,
                findings=(*report.findings, *shared),
                num_faults=report.num_faults + len(shared),
            )
        if report.num_faults:
            self.act(report)

    def act(self, report: SanitizerReport) -> None:
        """Write a faulty report to the log and the directory, and raise where asked to."""
        where = self._write(report)
        note = f"\n  the same as a page: {where}" if where else ""
        logger.error("Block tables of rank %d, %s%s", self._rank, report.text, note)
        if self._settings.action == "raise":
            raise BlockTableFaultError(report)

    def _slots(self, step: RunnerStep, group: int) -> torch.Tensor:
        slots = step.slot_mappings[group]
        if slots is not None:
            return slots
        like = next((other for other in step.slot_mappings if other is not None), None)
        size = int(step.query_start_loc[len(step.request_ids)]) if like is None else like.shape[0]
        # one tensor a group, so that it stays where it is
        if group not in self._no_slots:
            most = self._groups[0].layout.limits.max_num_batched_tokens
            device = step.block_tables[group].device
            self._no_slots[group] = torch.full((most,), PAD_SLOT, dtype=torch.int64, device=device)
        return self._no_slots[group][:size]

    def _write(self, report: SanitizerReport) -> Path | None:
        folder = self._settings.directory
        if folder is None:
            return None
        path = folder / f"step-{report.step:06d}-rank-{self._rank}-process-{os.getpid()}.html"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(report.to_html(), encoding="utf-8")
        except OSError as error:
            logger.warning("No page of the report: %s", error)
            return None
        return path
