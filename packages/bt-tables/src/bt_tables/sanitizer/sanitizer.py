"""The sanitizer: one call a step that says whether the step may touch what it is about to touch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

from bt_width import BlockTableLayout, InvalidEditError, InvalidSpecError

from .checks.faults import Faults
from .detector import make_detector
from .findings import BlockTableFaultError, CheckName, FaultKind, Finding, SanitizerReport
from .geometry import Geometry
from .plans import GroupPlan
from .step import CheckedStep, read_arguments

Mode: TypeAlias = Literal["raise", "report"]


class BlockTableSanitizer:
    """Checks the block tables and slot mappings of steps, of this project's tables or any other.

    Give it each step's tensors after the tables are ready and before a kernel reads them. It
    reads and changes none of them. On CUDA a check is one launch and one small copy back; a step
    in which something is wrong is then looked at again, to say what.

    Past a row's blocks it reads as far as that row of the batch held ids in the last checked
    step, which is where a stale id can be, and some columns more. The first step, a step after a
    fault, and every step where ``every`` is above 1 are read to the width.

    Attributes:
        findings: In mode "report", the first ``max_findings`` faults of all steps.
        num_faults: All faults of all steps.
    """

    def __init__(
        self,
        layouts: Sequence[BlockTableLayout],
        num_blocks: Sequence[int],
        *,
        mode: Mode = "raise",
        max_findings: int = 100,
        every: int = 1,
        fixed_addresses: bool = True,
    ) -> None:
        """Plan the checks of every group.

        Args:
            layouts: The groups' layouts.
            num_blocks: Blocks of each group's pool, the null block included.
            mode: "raise" at the first faulty step, or "report" and go on.
            max_findings: The most findings that are kept.
            every: Check one step in so many.
            fixed_addresses: Whether the tensors must stay where they were first seen, as
                captured graphs need.

        Raises:
            InvalidSpecError: An argument is of a wrong type or out of range.
            InvalidEditError: There is not one pool for each group.
        """
        plans = _plans_of(layouts, num_blocks)
        if not isinstance(mode, str) or mode not in ("raise", "report"):
            raise InvalidSpecError(f'mode must be "raise" or "report", not {mode!r}', mode=mode)
        self._mode = mode
        self._max_findings = _require_count("max_findings", max_findings)
        self._every = _require_count("every", every)
        limits = [layout.limits for layout in layouts]
        max_rows = max((limit.max_num_reqs for limit in limits), default=0)
        max_tokens = max((limit.max_num_batched_tokens for limit in limits), default=0)
        self._plans = plans
        self._max_rows = max_rows
        self._geometry = Geometry(plans, max_rows, max_tokens, fixed_addresses=fixed_addresses)
        self._detector = make_detector(plans, max_rows, torch.device("cpu"))
        self._steps = 0
        self.findings: list[Finding] = []
        self.num_faults = 0

    def check(
        self,
        block_tables: Sequence[torch.Tensor],
        slot_mappings: torch.Tensor | Sequence[torch.Tensor],
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        *,
        num_blocks_of_row: torch.Tensor,
        ref_counts: Sequence[torch.Tensor] | None = None,
    ) -> SanitizerReport:
        """Check one step; each request is in it once.

        Args:
            block_tables: One [rows, W] int32 tensor of kernel-block ids a group: the requests
                in batch order, then padding.
            slot_mappings: [G, tokens] int64, or one [tokens] tensor a group.
            seq_lens: [N or more] int32 or int64, each request's tokens, those of this step
                included, on all ranks together.
            query_start_loc: [N + 1 or more] int32 or int64, where each request's tokens begin.
            num_blocks_of_row: [N, G] int32 or int64, blocks that each row holds.
            ref_counts: One [num_blocks] int32 tensor a group: how many hold each block, 0 where
                it is free. Without it freed and shared blocks are not checked.

        Returns:
            What was found and what was not looked at.

        Raises:
            BlockTableFaultError: In mode "raise", something is wrong; it carries the report.
            BlockTableError: The arguments do not describe a step.
        """
        number = self._steps
        arguments = read_arguments(
            self._plans,
            block_tables,
            slot_mappings,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            num_blocks_of_row=num_blocks_of_row,
            ref_counts=ref_counts,
        )
        self._steps += 1
        if number % self._every:
            return SanitizerReport(step=number, checked=False)
        step, findings = self._geometry.check(arguments)
        faults = self._find(step)
        checks_off: tuple[CheckName, ...] = ()
        if ref_counts is None:
            checks_off = ("freed blocks", "shared blocks")
        report = self._report(number, step, findings, faults, checks_off)
        self.num_faults += report.num_faults
        if report.num_faults and self._mode == "raise":
            raise BlockTableFaultError(report)
        self.findings += report.findings[: self._max_findings - len(self.findings)]
        return report

    def rebind(self) -> None:
        """Let all tensors have moved and changed, as after a table's ``rebind``."""
        self._geometry.forget()
        self._detector.forget()

    def _find(self, step: CheckedStep) -> list[Faults] | None:
        if not step.groups:
            return []
        device = step.seq_lens.device
        if device != self._detector.device:
            self._detector = make_detector(self._plans, self._max_rows, device)
        if self._every > 1:
            self._detector.forget()
        return self._detector.find(step)

    def _report(
        self,
        number: int,
        step: CheckedStep,
        findings: list[Finding],
        faults: list[Faults] | None,
        checks_off: tuple[CheckName, ...],
    ) -> SanitizerReport:
        if faults is None:
            findings, faults = [*findings, Finding(kind=FaultKind.UNSTABLE)], []
        total = len(findings) + sum(map(len, faults))
        kept = findings[: self._max_findings]
        for some in faults:
            kept += some.findings(step.num_reqs, self._max_findings - len(kept))
        return SanitizerReport(
            step=number, findings=tuple(kept), num_faults=total, checks_off=checks_off
        )


def _plans_of(
    layouts: Sequence[BlockTableLayout], num_blocks: Sequence[int]
) -> tuple[GroupPlan, ...]:
    for name, values in (("layouts", layouts), ("num_blocks", num_blocks)):
        if not isinstance(values, (list, tuple)):
            raise InvalidSpecError(
                f"{name} must be a list or tuple with one entry a group, not {values!r}",
                argument=name,
            )
    for layout in layouts:
        if not isinstance(layout, BlockTableLayout):
            raise InvalidSpecError(f"each layout must be a BlockTableLayout, not {layout!r}")
    if len(layouts) != len(num_blocks):
        raise InvalidEditError(
            f"num_blocks must have one pool for each of {len(layouts)} groups, "
            f"got {len(num_blocks)}",
            num_groups=len(layouts),
            found=len(num_blocks),
        )
    for layout, pool in zip(layouts, num_blocks, strict=True):
        if _require_count("num_blocks", pool) > layout.max_block_id + 1:
            raise InvalidSpecError(
                f"a pool of {pool} blocks has ids past {layout.max_block_id}, the last one whose "
                "kernel-block ids are int32",
                num_blocks=pool,
                max_block_id=layout.max_block_id,
            )
    return tuple(map(GroupPlan.of, layouts, num_blocks))


def _require_count(name: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise InvalidSpecError(
            f"{name} must be an int of at least 1, not {value!r}", argument=name, value=value
        )
    return value
