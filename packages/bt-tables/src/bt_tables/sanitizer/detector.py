"""Looks at a step: the reference on the CPU; on CUDA the kernel, then the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .faults import Faults
from .reference import faults_of, find_faults, rows_of
from .step import CacheGroup, CheckedStep


class Detector(Protocol):
    """Finds the faults of steps that lie on one device."""

    device: torch.device

    def find(self, step: CheckedStep) -> list[Faults] | None:
        """Return the faults; None where the step changed while it was looked at."""
        ...

    def forget(self) -> None:
        """Read every row to its width in the next step."""
        ...


def make_detector(groups: Sequence[CacheGroup], max_rows: int, device: torch.device) -> Detector:
    """Return the device's detector; Triton is imported for CUDA alone."""
    if device.type != "cuda":
        return ReferenceDetector(groups, max_rows, device)
    from .kernel import KernelDetector

    return KernelDetector(groups, max_rows, device)


class Marks:
    """How far each row of each group's table may hold ids: known after it was looked at.

    Attributes:
        columns: [G, R] int32.
    """

    def __init__(self, groups: Sequence[CacheGroup], max_rows: int, device: torch.device) -> None:
        """Know nothing yet."""
        widths = [group.addressing.width for group in groups]
        self._widths = torch.tensor(widths, dtype=torch.int32, device=device)[:, None]
        self.columns = self._widths.repeat(1, max_rows)

    def forget(self) -> None:
        """Take every row for full."""
        self.columns.copy_(self._widths.expand_as(self.columns))


class ReferenceDetector:
    """Runs the reference on every step."""

    def __init__(self, groups: Sequence[CacheGroup], max_rows: int, device: torch.device) -> None:
        """Start with every row unknown."""
        self.device = device
        self._marks = Marks(groups, max_rows, device)

    def find(self, step: CheckedStep) -> list[Faults]:
        """Return the faults; where there is one, every row is read to its width, now and next."""
        rows = [rows_of(step, group) for group in step.groups]
        if not faults_of(step, rows, self._marks.columns):
            for group, of_group in zip(step.groups, rows, strict=True):
                live = of_group.live
                self._marks.columns[group.group, : live.shape[0]] = live.int()
            return []
        self._marks.forget()
        return find_faults(step, self._marks.columns)

    def forget(self) -> None:
        """Read every row to its width in the next step."""
        self._marks.forget()
