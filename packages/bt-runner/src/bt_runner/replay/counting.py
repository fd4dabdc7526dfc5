"""Copies, launches and bytes of table updates, counted where they are carried out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from bt_tables.devices import CpuExecutor, CudaExecutor

Launch: TypeAlias = Callable[..., None]


@dataclass(slots=True)
class UpdateCounts:
    """What table updates have cost so far.

    Attributes:
        num_copies: Copies to the device.
        num_bytes: Bytes of them.
        num_launches: Launches.
    """

    num_copies: int = 0
    num_bytes: int = 0
    num_launches: int = 0

    def clear(self) -> None:
        """Count from here."""
        self.num_copies = self.num_bytes = self.num_launches = 0

    def note_copy(self, source: torch.Tensor) -> None:
        """Count a copy."""
        self.num_copies += 1
        self.num_bytes += source.nbytes

    def counted(self, launch: Launch) -> Launch:
        """Return ``launch``, counted each time."""

        def counted(*args: Any) -> None:
            self.num_launches += 1
            launch(*args)

        return counted


class _CountingCpu(CpuExecutor):
    def __init__(self) -> None:
        self.counts = UpdateCounts()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.counts.note_copy(source)
        super().copy(destination, source)

    def step_launch(self, storage: Any) -> Launch:
        return self.counts.counted(super().step_launch(storage))


class _CountingCuda(CudaExecutor):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.counts = UpdateCounts()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.counts.note_copy(source)
        super().copy(destination, source)

    def step_launch(self, storage: Any) -> Launch:
        return self.counts.counted(super().step_launch(storage))


CountingExecutor: TypeAlias = _CountingCpu | _CountingCuda
"""What carries out table updates and counts them in ``counts``."""


def counting_executor(device: torch.device) -> CountingExecutor:
    """Return what carries out table updates on ``device``."""
    return _CountingCuda(device) if device.type == "cuda" else _CountingCpu()
