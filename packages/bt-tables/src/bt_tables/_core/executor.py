"""What carries out a step, in order: copies to a device, launches on it, and fences.

On the CPU a copy is done when the call returns and a launch is the twin. On CUDA both
are queued on the current stream, host memory is pinned and a fence is an event.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from .storage import Storage

StepLaunch: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]
"""Launch a step: the packet, the query starts, the positions, how many programs."""


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

    def host_ints(self, size: int) -> torch.Tensor:
        """Return host memory that ``copy`` reads from, int32."""
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


class _NothingToWaitFor:
    def record(self) -> None:
        """Nothing is ever queued on a CPU."""

    def wait(self) -> None:
        """Nothing is ever queued on a CPU."""


class CpuExecutor:
    """Copies at once; a launch is the twin."""

    device = torch.device("cpu")

    def host_ints(self, size: int) -> torch.Tensor:
        """Return plain memory."""
        return torch.zeros(size, dtype=torch.int32)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        destination.copy_(source)

    def fence(self) -> Fence:
        """Return a fence that never waits."""
        return _NothingToWaitFor()

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return the twin."""
        from ..reference import step_twin

        return step_twin(storage)


class _CudaFence:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch

    def record(self) -> None:
        """Record the event on the current stream."""
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait for the event; one that was never recorded is done."""
        self._event.synchronize()


class CudaExecutor:
    """Queues pinned copies and Triton launches on the current stream."""

    _warned = False

    def __init__(self, device: torch.device) -> None:
        """Use ``device``, the current one where it has no index."""
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)

    def host_ints(self, size: int) -> torch.Tensor:
        """Return pinned memory, or plain memory where there is none to be had."""
        try:
            return torch.zeros(size, dtype=torch.int32, pin_memory=True)
        except RuntimeError as error:
            if not CudaExecutor._warned:
                CudaExecutor._warned = True
                warnings.warn(
                    f"no pinned memory ({error}); block tables are copied from plain memory, "
                    "and each copy waits for the device",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return torch.zeros(size, dtype=torch.int32)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy; from plain memory CUDA has read it when this returns."""
        destination.copy_(source, non_blocking=True)

    def fence(self) -> Fence:
        """Return an event."""
        return _CudaFence(self.device)

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return the kernel's launcher."""
        from ..kernels.fused_step import step_launcher

        return step_launcher(storage)


def executor_for(device: str | torch.device | Executor) -> Executor:
    """Return what carries out steps on ``device``; an executor stands for itself."""
    if not isinstance(device, (str, torch.device)):
        return device
    wanted = torch.device(device)
    return CudaExecutor(wanted) if wanted.type == "cuda" else CpuExecutor()
