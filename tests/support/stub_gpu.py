"""A GPU that is not there: Triton's JIT specialises and compiles for it, and nothing runs.

For processes of compiled kernels only (``tests.support.compiled.run_compiled``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget


class StubGpu:
    """Just enough of a Triton driver for ``kernel.warmup``."""

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the only stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return the architecture that is compiled for."""
        return GPUTarget("cuda", 90, 32)


def install() -> None:
    """Make the stub the process's device."""
    triton.runtime.driver.set_active(StubGpu())


class Recorder:
    """A kernel that compiles what a launch would run, and counts the compilations.

    ``kernel[grid](...)`` specialises and compiles like a launch.
    """

    def __init__(self, kernel: Any) -> None:
        """Wrap a jitted ``kernel``."""
        self._kernel = kernel
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return the launcher that compiles only."""

        def launch(*args: object, **kwargs: object) -> object:
            self.launches += 1
            return self._kernel.warmup(*args, grid=grid, **kwargs)

        return launch

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call it as another kernel would."""
        return self._kernel(*args, **kwargs)

    @property
    def compilations(self) -> int:
        """How many different kernels the launches so far needed."""
        caches = self._kernel.device_caches.values()
        return sum(len(cache[0]) for cache in caches)
