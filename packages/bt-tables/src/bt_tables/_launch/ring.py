"""Host packets in turn: none is written again before the device has read it."""

from __future__ import annotations

import torch

from .arrays import IntArray
from .executor import Executor
from .wire import EDIT_OF_ROW_AT

_ROUND_INTS = 256


def _rounded(num_ints: int) -> int:
    """Round up to 1 KiB, so that few sizes are ever sent and their views can be kept."""
    return -(-num_ints // _ROUND_INTS) * _ROUND_INTS


class Packet:
    """A packet on the host, and where it goes on the device.

    Attributes:
        ints: The host's int32s, as NumPy sees them.
        buffer: The same memory, for ``struct``.
        longs: The same memory as int64s.
        edit_of_row: The row map in it, [R].
        used: Ints that are taken, from the start.
        capacity: Ints there is room for.
        device_ints: The packet on the device.
        device_longs: The same memory as int64s.
        ids_at: Where ids start.
    """

    def __init__(self, executor: Executor, num_rows: int, capacity: int) -> None:
        """Allocate both sides."""
        self._executor = executor
        self.capacity = _rounded(capacity)
        self._host = executor.host_ints(self.capacity)
        self.device_ints = executor.empty(self.capacity, torch.int32)
        self.device_longs = self.device_ints.view(torch.int64)
        self.ints = self._host.numpy()
        self.buffer = self.ints.data
        self.longs = self._host.view(torch.int64).numpy()
        self.ids_at = EDIT_OF_ROW_AT + num_rows
        self.edit_of_row = self.ints[EDIT_OF_ROW_AT : self.ids_at]
        self._fence = executor.fence()
        self._sends: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.reset()

    def reset(self) -> None:
        """Empty the packet for the next step."""
        self.edit_of_row.fill(0)
        self.used = self.ids_at

    def send(self, num_ints: int) -> None:
        """Send the first ``num_ints`` in one copy."""
        size = _rounded(num_ints)
        views = self._sends.get(size)
        if views is None:
            views = self._sends[size] = (self.device_ints[:size], self._host[:size])
        self._executor.copy(*views)
        self._fence.record()

    def wait(self) -> None:
        """Return once the device has read what was sent."""
        self._fence.wait()


class HostRing:
    """As many packets as steps may be in flight, filled and sent in turn."""

    def __init__(self, executor: Executor, num_rows: int, depth: int, capacity: int) -> None:
        """Allocate ``depth`` packets."""
        self._executor = executor
        self._num_rows = num_rows
        self._packets = [Packet(executor, num_rows, capacity) for _ in range(depth)]
        self._turn = 0
        self._is_open = False

    def open(self) -> Packet:
        """Return the packet that is being filled; the next one once that was sent."""
        packet = self._packets[self._turn]
        if not self._is_open:
            packet.wait()
            packet.reset()
            self._is_open = True
        return packet

    def close(self) -> None:
        """The open packet was sent: the next one is filled next."""
        self._turn = (self._turn + 1) % len(self._packets)
        self._is_open = False

    def put(self, ids: IntArray) -> int:
        """Write ids behind what the open packet holds; return where they start."""
        packet = self.with_room(len(ids))
        start = packet.used
        packet.used = start + len(ids)
        packet.ints[start : packet.used] = ids
        return start

    def with_room(self, num_ints: int) -> Packet:
        """Return the open packet with room for as many more, in a larger one if it must be.

        The device has read whatever was sent from the packet that is replaced.
        """
        packet = self.open()
        needed = packet.used + num_ints
        if needed <= packet.capacity:
            return packet
        grown = Packet(self._executor, self._num_rows, max(needed, 2 * packet.capacity))
        grown.ints[: packet.used] = packet.ints[: packet.used]
        grown.used = packet.used
        self._packets[self._turn] = grown
        return grown
