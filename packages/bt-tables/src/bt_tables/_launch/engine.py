"""One step: the packet is completed, sent in one copy, and carried out in one launch.

It knows neither which table it works for nor what an edit means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bt_width import BlockTableLayout

from .arrays import IntArray
from .executor import Executor
from .ring import HostRing, Packet
from .storage import Storage
from .tokens import NO_TOKENS, Tokens
from .wire import COLUMN_TILE, HEADER_STRUCT, TOKEN_TILE, Header, record_ints

MAX_COLUMN_PROGRAMS = 16_384
"""Column programs of a launch, at most; longer rows are written in turns by the same ones."""

NO_RECORDS = np.empty((0, 0), np.int32)


class Entries(NamedTuple):
    """The records of a step.

    Attributes:
        edits: Records that change rows, [E, ints of a record].
        copies: Records that write batch rows whole, [C, ints of a record].
        longest: The most blocks that one of them writes in a group, or more.
    """

    edits: IntArray
    copies: IntArray
    longest: int


NO_ENTRIES = Entries(NO_RECORDS, NO_RECORDS, 0)


class StepEngine:
    """Sends packets and launches them.

    Attributes:
        device: Where the tables lie.
        storage: The tables.
        ring: The packets.
    """

    def __init__(
        self,
        layouts: Sequence[BlockTableLayout],
        executor: Executor,
        *,
        num_packets: int,
        rows_are_batch: bool,
    ) -> None:
        """Allocate everything that steps of ordinary size need.

        Raises:
            InvalidSpecError: An argument is no such number, or layouts do not go together.
        """
        self.device = executor.device
        self.storage = Storage(layouts, executor, rows_are_batch=rows_are_batch)
        self._num_groups = len(self.storage.facts)
        record = record_ints(self._num_groups)
        self._record_ints = record
        self._max_split = max((facts.split for facts in self.storage.facts), default=1)
        num_rows = self.storage.num_rows
        capacity = num_rows * (record + 8) + 4096
        self.ring = HostRing(executor, num_rows, num_packets, capacity)
        self._launch = executor.step_launch(self.storage)
        self._slots_used = 0

    def run(self, entries: Entries, requests: IntArray, tokens: Tokens | None) -> None:
        """Carry out a step; without work there is no copy and no launch.

        Args:
            entries: What changes in rows and batch rows.
            requests: The row of each request whose tokens are mapped, [N] int32.
            tokens: The tokens to map, or None to leave the slots alone. Slots of earlier
                steps at or above the bound are padded.
        """
        num_edits, num_copies = len(entries.edits), len(entries.copies)
        num_entries = num_edits + num_copies
        slots_end = max(tokens.bound, self._slots_used) if tokens else 0
        if not (num_entries or slots_end):
            return
        inputs = tokens or NO_TOKENS
        num_requests, bound = len(requests), inputs.bound
        packet = self.ring.open()
        at = packet.used
        needed = at + num_entries * self._record_ints + 2 * (num_requests + 1 + bound)
        packet = self.ring.with_room(packet, needed)
        entries_at = at
        at = _put_records(packet, at, entries.edits)
        at = _put_records(packet, at, entries.copies)

        requests_at = at
        at += num_requests
        packet.ints[requests_at:at] = requests
        starts, starts_at, positions, positions_at = inputs.starts, 0, inputs.positions, 0
        if isinstance(starts, np.ndarray):
            starts_at = at
            at += num_requests + 1
            packet.ints[starts_at:at] = starts
            starts = packet.device_ints
        if isinstance(positions, np.ndarray):
            positions_at = (at + 1) >> 1
            end = positions_at + bound
            packet.longs[positions_at:end] = positions[:bound]
            at = 2 * end
            positions = packet.device_longs

        num_groups = self._num_groups
        token_tiles = -(-slots_end // TOKEN_TILE)
        chunks = self._chunks(entries)
        HEADER_STRUCT.pack_into(
            packet.buffer,
            0,
            num_groups,
            entries_at,
            num_edits,
            num_entries,
            requests_at,
            num_requests,
            starts_at,
            positions_at,
            bound,
            slots_end,
            token_tiles,
            chunks,
        )
        packet.send(at)
        programs = num_groups * (token_tiles + num_entries * chunks)
        self._launch(packet.device_ints, starts, positions, programs)
        self.ring.close()
        if tokens:
            self._slots_used = bound

    def launch_nothing(self) -> None:
        """Launch a step without work, for what that compiles."""
        packet = self.ring.open()
        header = Header(*(0,) * len(Header._fields))
        header = header._replace(num_groups=self._num_groups, chunks=1)
        HEADER_STRUCT.pack_into(packet.buffer, 0, *header)
        packet.send(packet.ids_at)
        self._launch(packet.device_ints, packet.device_ints, packet.device_longs, 1)
        packet.wait()

    def await_packet(self) -> None:
        """Return once the device has read what a failed step may have sent."""
        self.ring.open().wait()

    def forget_slots(self) -> None:
        """Any slot may hold anything from now on."""
        self._slots_used = self.storage.num_slots

    def _chunks(self, entries: Entries) -> int:
        """Return how many programs share a record's columns; any number would be right."""
        columns = entries.longest * self._max_split
        if columns <= COLUMN_TILE:
            return 1
        programs = (len(entries.edits) + len(entries.copies)) * self._num_groups
        return max(1, min(-(-columns // COLUMN_TILE), MAX_COLUMN_PROGRAMS // programs))


def _put_records(packet: Packet, at: int, found: IntArray) -> int:
    if not len(found):
        return at
    end = at + found.size
    packet.ints[at:end] = found.reshape(-1)
    return end
