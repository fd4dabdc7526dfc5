"""The kernels on CPU tables, interpreted, in the place of their twins."""

from __future__ import annotations

import itertools

import torch
from tests.support.interpreted import shuffled_programs

from bt_tables._launch.executor import StepLaunch
from bt_tables._launch.storage import Storage
from bt_tables.devices import CpuExecutor


class InterpretedExecutor(CpuExecutor):
    """Copies at once; a launch is the interpreted kernel, its programs in random order."""

    def __init__(self, seed: int = 0) -> None:
        """Draw the orders from ``seed``."""
        self._seeds = itertools.count(seed)

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return the kernel's launcher."""
        from bt_tables.kernels.fused_step import step_launcher

        inner = step_launcher(storage)

        def launch(
            packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
        ) -> None:
            with shuffled_programs(next(self._seeds)):
                inner(packet, starts, positions, programs)

        return launch
