"""The sanitizer: one call a step that says whether its tables and slots are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch

from bt_width import BlockTableLayout, InvalidEditError, InvalidSpecError, WidthMismatchError

from .detector import make_detector
from .drawing import draw_row
from .faults import Faults
from .findings import BlockTableFaultError, CheckName, FaultKind, Finding, SanitizerReport
from .shapes import ShapeChecks
from .step import CacheGroup, CheckedStep, read_arguments

Mode: TypeAlias = Literal["raise", "report"]

_MAX_PICTURES = 20
"""Findings of a report that are drawn: a step that is wrong throughout stays readable."""


class BlockTableSanitizer:
    """Checks the block tables and slot mappings of steps, of this project's tables or any other.

    Give it each step's tensors after the tables are ready and before a kernel reads them. It
    reads and changes none of them. On CUDA a check is one launch and one small copy back; a step
    in which something is wrong is then looked at again, to say what.

    Past a row's blocks it reads as far as that row of the batch held ids in the last checked
    step, which is where a stale id can be, and some columns more. The first step, a step after a
    fault, and every step where ``every`` is above 1 are read to the width.

    It is not thread-safe: steps are checked one after another, by one thread at a time. Several
    sanitizers in several threads do not disturb each other.

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
        checks_untouched: bool = True,
        checks_shared_writes: bool = True,
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
            checks_untouched: Whether columns are looked at that a request's step neither reads
                nor writes. False for engines that leave old ids there: past a row's blocks,
                behind a window, before a recurrent state.
            checks_shared_writes: Whether a block that the step writes must have one holder alone.
                False for engines in which a request may hit a prefix that another one computes
                in the same step.

        Raises:
            InvalidSpecError: An argument is of a wrong type or out of range.
            InvalidEditError: The number of pools is not that of groups.
        """
        groups = _read_groups(layouts, num_blocks)
        if not isinstance(mode, str) or mode not in ("raise", "report"):
            raise InvalidSpecError(f'mode must be "raise" or "report", not {mode!r}', mode=mode)
        self._mode = mode
        self._max_findings = _require_count("max_findings", max_findings)
        self._every = _require_count("every", every)
        limits = [layout.limits for layout in layouts]
        max_rows = max((limit.max_num_reqs for limit in limits), default=0)
        max_tokens = max((limit.max_num_batched_tokens for limit in limits), default=0)
        self._layouts = tuple(layouts)
        self._groups = groups
        self._max_rows = max_rows
        self._shapes = ShapeChecks(
            groups,
            max_rows,
            max_tokens,
            fixed_addresses=fixed_addresses,
            checks_untouched=checks_untouched,
            checks_shared_writes=checks_shared_writes,
        )
        self._detector = make_detector(groups, max_rows, torch.device("cpu"))
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
        ref_blocks: Sequence[torch.Tensor] | None = None,
        request_ids: Sequence[int | str] | None = None,
        edits_of: Callable[[int], Sequence[str]] | None = None,
    ) -> SanitizerReport:
        """Check one step; each request is in it once.

        The last four arguments come from whoever allocates the blocks, not from the tables.

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
            ref_blocks: One [N or more, blocks] int32 tensor a group: the blocks that each row was
                given, in order, null where it has none. Without it a row that is sound in itself
                passes, such as one with two unwritten columns exchanged. A column that the step
                does not touch may be null all the same.
            request_ids: [N] the requests' ids, which findings then name; by default their rows.
            edits_of: Returns the last edits of a batch row, oldest first, for the pictures of a
                report; called only where something was found.

        Returns:
            What was found and what was not looked at.

        Raises:
            BlockTableFaultError: In mode "raise", something is wrong; it carries the report.
            BlockTableError: The arguments do not describe a step.
        """
        number = self._steps
        arguments = read_arguments(
            self._groups,
            block_tables,
            slot_mappings,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            num_blocks_of_row=num_blocks_of_row,
            ref_counts=ref_counts,
            ref_blocks=ref_blocks,
        )
        requests = _read_requests(request_ids, arguments.num_reqs)
        self._steps += 1
        if number % self._every:
            return SanitizerReport(step=number, checked=False)
        step, findings = self._shapes.check(arguments)
        faults = self._find(step)
        checks_off: list[CheckName] = []
        if ref_counts is None:
            checks_off += ["freed blocks", "shared blocks"]
        if ref_blocks is None:
            checks_off += ["exchanged blocks"]
        report = _report(number, findings, faults, requests, self._max_findings, checks_off)
        if report.findings:
            report = self._drawn(report, step, requests, edits_of)
        self.num_faults += report.num_faults
        if report.num_faults and self._mode == "raise":
            raise BlockTableFaultError(report)
        self.findings += report.findings[: self._max_findings - len(self.findings)]
        return report

    def rebind(self) -> None:
        """Let all tensors have moved and changed, as after a table's ``rebind``."""
        self._shapes.forget()
        self._detector.forget()

    def _find(self, step: CheckedStep) -> list[Faults] | None:
        if not step.groups:
            return []
        device = step.seq_lens.device
        if device != self._detector.device:
            self._detector = make_detector(self._groups, self._max_rows, device)
        if self._every > 1:
            self._detector.forget()
        return self._detector.find(step)

    def _drawn(
        self,
        report: SanitizerReport,
        step: CheckedStep,
        requests: Sequence[int | str],
        edits_of: Callable[[int], Sequence[str]] | None,
    ) -> SanitizerReport:
        """Return the report with the rows of its first findings drawn."""
        groups = {group.group: group for group in step.groups}

        def drawn(finding: Finding) -> Finding:
            group = None if finding.group is None else groups.get(finding.group)
            if group is None or finding.row is None or finding.row >= group.table.shape[0]:
                return finding
            given = None
            is_request = finding.row < len(requests)
            if group.ref_blocks is not None and is_request:
                given = group.ref_blocks[finding.row].tolist()[: group.addressing.blocks_per_row]
                # what is no block cannot be expanded, and is not expected anywhere
                given = [block if 0 < block < group.num_blocks else 0 for block in given]
            picture = draw_row(
                finding,
                self._layouts[group.group],
                group.table,
                block_ids=given,
                request_ids=requests,
                edits=edits_of(finding.row) if edits_of is not None and is_request else (),
            )
            return replace(finding, picture=picture)

        first, rest = report.findings[:_MAX_PICTURES], report.findings[_MAX_PICTURES:]
        return replace(report, findings=(*map(drawn, first), *rest))


def _report(
    number: int,
    findings: Sequence[Finding],
    faults: Sequence[Faults] | None,
    requests: Sequence[int | str],
    max_findings: int,
    checks_off: Sequence[CheckName],
) -> SanitizerReport:
    if faults is None:
        findings, faults = [*findings, Finding(kind=FaultKind.UNSTABLE)], []
    kept = list(findings[:max_findings])
    for some in faults:
        kept += some.findings(requests, max_findings - len(kept))
    return SanitizerReport(
        step=number,
        findings=tuple(kept),
        num_faults=len(findings) + sum(map(len, faults)),
        checks_off=tuple(checks_off),
    )


def _read_requests(request_ids: Sequence[int | str] | None, num_reqs: int) -> Sequence[int | str]:
    if request_ids is None:
        return range(num_reqs)
    if not isinstance(request_ids, (list, tuple, range)) or not all(
        isinstance(request, (int, str)) for request in request_ids
    ):
        raise InvalidSpecError(
            "request_ids must be a list or tuple of ints or strings", argument="request_ids"
        )
    if len(request_ids) != num_reqs:
        raise WidthMismatchError(
            f"request_ids must name each of {num_reqs} requests, got {len(request_ids)}",
            argument="request_ids",
            expected=num_reqs,
            found=len(request_ids),
        )
    return request_ids


def _read_groups(
    layouts: Sequence[BlockTableLayout], num_blocks: Sequence[int]
) -> tuple[CacheGroup, ...]:
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
    return tuple(
        CacheGroup(layout.addressing, pool)
        for layout, pool in zip(layouts, num_blocks, strict=True)
    )


def _require_count(name: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise InvalidSpecError(
            f"{name} must be an int of at least 1, not {value!r}", argument=name, value=value
        )
    return value
