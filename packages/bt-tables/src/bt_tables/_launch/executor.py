"""What carries out a step, in order: copies to a device, launches on it, and fences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from .storage import Storage


StepLaunch: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]
"""Launch a step: the packet, the query starts, the positions, how many programs."""


CsrLaunch: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]
"""Gather a table's ids: the table, ``indptr``, the output, tokens of a column or 0."""


class Fence(Protocol):
    """A mark in the order of what was queued."""

    def record(self) -> None:
        """Set the mark behind everything queued so far."""
        ...

    def wait(self) -> None:
        """Return once everything before the mark is done; at once if there is none."""
        ...


class Executor(Protocol):
    """A device that carries out steps."""

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        ...

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return device memory, flat, holding anything."""
        ...

    def host_ints(self, size: int) -> torch.Tensor:
        """Return host memory that ``copy`` reads from, int32, holding anything."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from host memory to the device."""
        ...

    def fence(self) -> Fence:
        """Return a fence that has no mark yet."""
        ...

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return what launches a step on these tables."""
        ...

    def csr_launch(self) -> CsrLaunch:
        """Return what gathers a batch's ids."""
        ...
