"""Stand-ins for a device: one that checks, one that interprets kernels, one that is late."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tests.support.interpreted import shuffled_programs
from tests.support.poison import Guarded, guarded

from bt_tables._storage import Storage
from bt_tables.devices import CpuExecutor, CsrLaunch, Fence, StepLaunch
from bt_tables.reference.fused_step import fused_step, step_work


class GuardedExecutor(CpuExecutor):
    """A CPU whose memory starts as poison and lies between guards."""

    def __init__(self) -> None:
        """Guard nothing yet."""
        self._guarded: list[Guarded] = []

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return poisoned device memory."""
        memory = guarded(size, dtype)
        self._guarded.append(memory)
        return memory.inner

    def full(self, size: int, dtype: torch.dtype, value: int) -> torch.Tensor:
        """Return guarded device memory."""
        return self.empty(size, dtype).fill_(value)

    def host_ints(self, size: int) -> torch.Tensor:
        """Return poisoned host memory."""
        return self.empty(size, torch.int32)

    @property
    def num_allocations(self) -> int:
        """How often memory was asked for."""
        return len(self._guarded)

    @property
    def intact(self) -> bool:
        """Whether no guard was touched."""
        return all(memory.intact for memory in self._guarded)


@dataclass
class Counts:
    """What steps have cost so far.

    Attributes:
        launches: Launches.
        programs: Programs of all launches.
        copies: Copies to the device.
        bytes_sent: Bytes of these copies.
        elements_written: Elements of rows and batch rows that launches wrote.
    """

    launches: int = 0
    programs: int = 0
    copies: int = 0
    bytes_sent: int = 0
    elements_written: int = 0


class CheckedExecutor(GuardedExecutor):
    """Counts what a step costs, and proves that its programs need not wait for each other."""

    def __init__(self) -> None:
        """Nothing happened yet."""
        super().__init__()
        self.counts = Counts()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy and count."""
        self.counts.copies += 1
        self.counts.bytes_sent += source.nbytes
        super().copy(destination, source)

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return the reference behind the check."""

        def launch(
            packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
        ) -> None:
            self.counts.launches += 1
            self.counts.programs += programs
            self.counts.elements_written += check_no_race(storage, packet, starts, positions)
            fused_step(storage, packet.numpy(), starts.numpy(), positions.numpy())

        return launch


def check_no_race(
    storage: Storage, packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor
) -> int:
    """Fail if a launch writes a place twice, or reads one that it writes.

    Returns:
        Elements of rows and batch rows that it writes.
    """
    work = step_work(storage, packet.numpy(), starts.numpy(), positions.numpy())
    for places in (work.rows.places, work.batch.places, work.slots.places):
        assert len(np.unique(places)) == len(places), "a launch writes a place twice"
    rows_written = work.rows.places
    assert not np.intersect1d(rows_written, work.rows_read).size, "a launch reads what it writes"
    return len(work.rows.places) + len(work.batch.places)


class InterpretedExecutor(GuardedExecutor):
    """A launch is the interpreted kernel, its programs in random order."""

    def __init__(self, seed: int = 0) -> None:
        """Draw the orders from ``seed``."""
        super().__init__()
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

    def csr_launch(self) -> CsrLaunch:
        """Return the kernel's launcher."""
        from bt_tables.kernels.gather_csr import gather_csr

        return gather_csr


class LateExecutor(CpuExecutor):
    """A device that does nothing before it must: the latest that a real one may be.

    Copies and launches wait in a queue until a fence or ``catch_up`` runs them, so host
    memory that is written again too early shows as a wrong table.
    """

    def __init__(self, *, fences_wait: bool = True) -> None:
        """Start idle; without waiting fences it is as wrong as a missing event."""
        self._queue: list[Callable[[], object]] = []
        self._done = 0
        self._fences_wait = fences_wait
        self.waits = 0

    def catch_up(self, until: int | None = None) -> None:
        """Run what waits, up to a mark or all of it."""
        end = len(self._queue) if until is None else until
        while self._done < end:
            self._queue[self._done]()
            self._done += 1

    def then(self, work: Callable[[], object]) -> None:
        """Queue ``work`` behind everything else."""
        self._queue.append(work)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy."""
        self._queue.append(lambda: destination.copy_(source))

    def fence(self) -> Fence:
        """Return a fence that runs the queue up to its mark."""
        return _LateFence(self)

    def synchronize(self) -> None:
        """Run all that waits, unless fences are broken."""
        self.wait(self.mark())

    def step_launch(self, storage: Storage) -> StepLaunch:
        """Return a launch that queues the reference."""
        inner = super().step_launch(storage)

        def launch(
            packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
        ) -> None:
            self._queue.append(lambda: inner(packet, starts, positions, programs))

        return launch

    def csr_launch(self) -> CsrLaunch:
        """Return a launch that queues the reference."""
        inner = super().csr_launch()

        def launch(
            table: torch.Tensor,
            indptr: torch.Tensor,
            indices: torch.Tensor,
            num_indices: int,
            per_column: int,
        ) -> None:
            self._queue.append(lambda: inner(table, indptr, indices, num_indices, per_column))

        return launch

    @property
    def done(self) -> int:
        """How much of what was queued was done."""
        return self._done

    def mark(self) -> int:
        """Return a mark behind everything queued."""
        return len(self._queue)

    def wait(self, mark: int) -> None:
        """Run the queue up to a mark, unless fences are broken."""
        if mark > self._done and self._fences_wait:
            self.waits += 1
            self.catch_up(mark)


class _LateFence:
    def __init__(self, executor: LateExecutor) -> None:
        self._executor = executor
        self._mark = 0

    def record(self) -> None:
        self._mark = self._executor.mark()

    def wait(self) -> None:
        self._executor.wait(self._mark)
