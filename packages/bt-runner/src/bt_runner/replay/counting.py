"""Copies, launches and bytes of table updates, counted where they are carried out."""

from __future__ import annotations

import torch

from bt_tables._core.executor import CsrLaunch, Executor, Fence, StepLaunch, executor_for
from bt_tables._core.storage import Storage


class CountingExecutor:
    """Counts what passes on its way to a device.

    Attributes:
        num_copies: Copies to the device.
        num_bytes: Bytes of them.
        num_launches: Launches.
    """

    def __init__(self, device: torch.device) -> None:
        """Count from 0."""
        self.num_copies = 0
        self.num_bytes = 0
        self.num_launches = 0
        self._inner: Executor = executor_for(device)

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        return self._inner.device

    def host_ints(self, size: int) -> torch.Tensor:
        """Return host memory that ``copy`` reads from."""
        return self._inner.host_ints(size)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Count a copy and make it."""
        self.num_copies += 1
        self.num_bytes += source.nbytes
        self._inner.copy(destination, source)

    def fence(self) -> Fence:
        """Return a fence."""
        return self._inner.fence()

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return what counts a launch and makes it."""
        launch = self._inner.step_launch(storage)

        def counted(
            packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
        ) -> None:
            self.num_launches += 1
            launch(packet, starts, positions, programs)

        return counted

    def csr_launch(self) -> CsrLaunch:
        """Return what gathers a batch's ids; no step of a replay does."""
        return self._inner.csr_launch()
