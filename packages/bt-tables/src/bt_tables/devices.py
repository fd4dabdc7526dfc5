"""The devices that tables lie on: a CPU, where launches are the reference, and CUDA.

On the CPU a copy is done when the call returns. On CUDA copies and launches are queued
on the current stream, host memory is pinned and a fence is an event.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from bt_width import InvalidSpecError

from ._checks import shown
from .reference.fused_step import reference_step
from .reference.gather_csr import gather_csr

if TYPE_CHECKING:
    from ._storage import Storage

StepLaunch: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]
"""Launch a step: the packet, the query starts, the positions, how many programs."""

CsrLaunch: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], None]
"""Gather ids: the table, ``indptr``, the output, its elements, tokens of a column or 0."""


class Fence(Protocol):
    """A mark in the order of what was queued."""

    def record(self) -> None:
        """Set the mark behind everything queued so far."""
        ...

    def wait(self) -> None:
        """Return once everything before the mark is done; at once if there is none."""
        ...


class Executor(Protocol):
    """A device that carries out steps in order: copies, launches and fences."""

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        ...

    def memory_bytes(self) -> int:
        """Return how much memory the device can still give, or more."""
        ...

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return device memory, flat, holding anything."""
        ...

    def full(self, size: int, dtype: torch.dtype, value: int) -> torch.Tensor:
        """Return device memory, flat, holding ``value`` everywhere."""
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

    def synchronize(self) -> None:
        """Return once everything that was queued is done."""
        ...

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return what launches a step on these tables."""
        ...

    def csr_launch(self) -> CsrLaunch:
        """Return what gathers a batch's ids."""
        ...


class _NothingToWaitFor:
    def record(self) -> None:
        """Nothing is ever queued on a CPU."""

    def wait(self) -> None:
        """Nothing is ever queued on a CPU."""


class CpuExecutor:
    """Copies at once; a launch is the reference implementation."""

    device = torch.device("cpu")

    def memory_bytes(self) -> int:
        """Return what the system says is available, or all that it has."""
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
            available = next(line for line in lines if line.startswith("MemAvailable:"))
            return int(available.split()[1]) * 1024
        except (OSError, StopIteration, ValueError, IndexError):
            return _physical_memory()

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the CPU."""
        return torch.empty(size, dtype=dtype)

    def full(self, size: int, dtype: torch.dtype, value: int) -> torch.Tensor:
        """Return memory of the CPU; zeros take none before they are written to."""
        if not value:
            return torch.zeros(size, dtype=dtype)
        return self.empty(size, dtype).fill_(value)

    def host_ints(self, size: int) -> torch.Tensor:
        """Return plain memory."""
        return torch.empty(size, dtype=torch.int32)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        destination.copy_(source)

    def fence(self) -> Fence:
        """Return a fence that never waits."""
        return _NothingToWaitFor()

    def synchronize(self) -> None:
        """Nothing is ever queued on a CPU."""

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return the reference implementation."""
        return reference_step(storage)

    def csr_launch(self) -> CsrLaunch:
        """Return the reference implementation."""
        return gather_csr


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        # unknown: the allocation itself says whether there is enough
        return 2**63 - 1


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
        self._pins = True

    def memory_bytes(self) -> int:
        """Return the free memory of the device, and what torch keeps of it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + kept

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device."""
        return torch.empty(size, dtype=dtype, device=self.device)

    def full(self, size: int, dtype: torch.dtype, value: int) -> torch.Tensor:
        """Return memory of the device."""
        return self.empty(size, dtype).fill_(value)

    def host_ints(self, size: int) -> torch.Tensor:
        """Return pinned memory, or plain memory where there is none to be had."""
        try:
            return torch.empty(size, dtype=torch.int32, pin_memory=True)
        except RuntimeError as error:
            self._pins = False
            if not CudaExecutor._warned:
                CudaExecutor._warned = True
                warnings.warn(
                    f"no pinned memory ({error}); block tables are copied from plain memory, "
                    "and each copy waits for the device",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return torch.empty(size, dtype=torch.int32)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy; from plain memory CUDA has read it when this returns."""
        destination.copy_(source, non_blocking=self._pins)

    def fence(self) -> Fence:
        """Return an event."""
        return _CudaFence(self.device)

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        torch.cuda.synchronize(self.device)

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return the kernel's launcher."""
        from .kernels.fused_step import step_launcher

        inner, index = step_launcher(storage), self.device.index

        def launch(
            packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
        ) -> None:
            # Triton launches on the current device, whatever the tensors'
            if torch.cuda.current_device() == index:
                inner(packet, starts, positions, programs)
            else:
                with torch.cuda.device(index):
                    inner(packet, starts, positions, programs)

        return launch

    def csr_launch(self) -> CsrLaunch:
        """Return the kernel's launcher."""
        from .kernels.gather_csr import gather_csr as inner

        def launch(
            table: torch.Tensor,
            indptr: torch.Tensor,
            indices: torch.Tensor,
            num_indices: int,
            per_column: int,
        ) -> None:
            with torch.cuda.device(self.device):
                inner(table, indptr, indices, num_indices, per_column)

        return launch


def executor_for(device: str | torch.device | Executor) -> Executor:
    """Return what carries out steps on ``device``; an executor stands for itself.

    Raises:
        InvalidSpecError: The device is absent, or tables cannot lie on it.
    """
    if not isinstance(device, (str, torch.device)):
        if not hasattr(device, "step_launch"):
            raise InvalidSpecError(
                f"device must be a device or its name, not {shown(device)}", device=device
            )
        return device
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise InvalidSpecError(f"{shown(device)} is not a device", device=device) from error
    match wanted.type:
        case "cpu":
            return CpuExecutor()
        case "cuda":
            # is_available initialises nothing
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if (wanted.index or 0) >= count:
                raise InvalidSpecError(
                    f"there is no {device}: {count} CUDA devices", device=str(device), count=count
                )
            return CudaExecutor(wanted)
    raise InvalidSpecError(f"tables lie on a CPU or on CUDA, not on {device}", device=str(device))
