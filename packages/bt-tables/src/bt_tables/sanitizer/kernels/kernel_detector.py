"""One launch a step, and the twin's word where the launch saw something."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ..checks.faults import Faults
from ..detector import Marks
from ..plans import GroupPlan
from ..reference import find_faults
from ..step import CheckedStep
from .check_step import Scratch, launch_check
from .owner_check import MAX_LAUNCHES
from .plan_line import PlanLine


class KernelDetector:
    """Runs the kernel on every step, and the twin on those at fault."""

    def __init__(self, plans: Sequence[GroupPlan], max_rows: int, device: torch.device) -> None:
        """Allocate what the launches leave behind: 8 bytes a block, 4 a row and group."""
        self.device = device
        self._marks = Marks(plans, max_rows, device)
        self._claims_at = list(itertools.accumulate((plan.num_blocks for plan in plans), initial=0))
        self._scratch = Scratch.make(self._marks.columns, self._claims_at[-1])
        self._launch = 0
        self._lines: tuple[tuple[int, ...], ...] = ()
        self._plans = torch.empty(0, dtype=torch.int64, device=device)

    def find(self, step: CheckedStep) -> list[Faults] | None:
        """Return the faults that the twin names, None where it sees nothing of what was seen."""
        if not self.detect(step).any():
            return []
        self.forget()
        return find_faults(step, self._marks.columns) or None

    def detect(self, step: CheckedStep) -> torch.Tensor:
        """Launch, and return [G, checks] on the host: which checks failed in which group."""
        if self._launch == MAX_LAUNCHES:
            self.forget()
        self._launch += 1
        # Triton launches on the current device, which need not be the tables'
        with torch.cuda.device(self._scratch.found.get_device()):
            launch_check(step, self._load_lines(step), self._scratch, self._launch)
        return self._scratch.found.cpu() == self._launch

    def forget(self) -> None:
        """Read every row to its width in the next step, and count claims and launches anew."""
        self._marks.forget()
        self._scratch.claims.zero_()
        self._scratch.found.zero_()
        self._launch = 0

    def _load_lines(self, step: CheckedStep) -> torch.Tensor:
        lines = tuple(
            (*PlanLine.of(group, self._claims_at[group.group]), *group.plan)
            for group in step.groups
        )
        if lines != self._lines:
            self._lines = lines
            self._plans = torch.tensor(lines, dtype=torch.int64, device=self.device)
        return self._plans
