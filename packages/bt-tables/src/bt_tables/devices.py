"""The devices that tables lie on: a CPU, where launches are the twins, and CUDA.

On the CPU a copy is done when the call returns. On CUDA copies and launches are queued
on the current stream, host memory is pinned and a fence is an event.
"""

from __future__ import annotations

import warnings

import torch

from bt_width import InvalidSpecError

from ._launch.executor import CsrLaunch, Executor, Fence, StepLaunch
from ._launch.storage import Storage
from .reference.fused_step import step_twin
from .reference.gather_csr import gather_csr


class _NothingToWaitFor:
    def record(self) -> None:
        """Nothing is ever queued on a CPU."""

    def wait(self) -> None:
        """Nothing is ever queued on a CPU."""


class CpuExecutor:
    """Copies at once; a launch is the twin."""

    device = torch.device("cpu")

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the CPU."""
        return torch.empty(size, dtype=dtype)

    def host_ints(self, size: int) -> torch.Tensor:
        """Return plain memory."""
        return torch.empty(size, dtype=torch.int32)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        destination.copy_(source)

    def fence(self) -> Fence:
        """Return a fence that never waits."""
        return _NothingToWaitFor()

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return the twin."""
        return step_twin(storage)

    def csr_launch(self) -> CsrLaunch:
        """Return the twin."""
        return gather_csr


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

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device."""
        return torch.empty(size, dtype=dtype, device=self.device)

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
            table: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, per_column: int
        ) -> None:
            with torch.cuda.device(self.device):
                inner(table, indptr, indices, per_column)

        return launch


def executor_for(device: str | torch.device | Executor) -> Executor:
    """Return what carries out steps on ``device``; an executor stands for itself."""
    if not isinstance(device, (str, torch.device)):
        if not hasattr(device, "step_launch"):
            raise InvalidSpecError(
                f"device must be a device or its name, not {device!r}", device=device
            )
        return device
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise InvalidSpecError(f"{device!r} is no device", device=device) from error
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
