"""One step: the packet is completed, sent in one copy, and carried out in one launch.

It knows neither which table it works for nor what an edit means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

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


class _Inputs(NamedTuple):
    """Where a launch finds the tokens: in the packet, or in the caller's tensors.

    Attributes:
        starts: What holds the query starts, on the device.
        starts_at: Where in it they start.
        positions: What holds the positions, on the device.
        positions_at: Where in it they start, in int64s.
        end: Where the packet ends.
    """

    starts: torch.Tensor
    starts_at: int
    positions: torch.Tensor
    positions_at: int
    end: int


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
        # an edit of every row, a decode batch of all of them, and a prompt's ids
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
        num_edits, num_requests = len(entries.edits), len(requests)
        num_entries = num_edits + len(entries.copies)
        slots_end = max(tokens.bound, self._slots_used) if tokens else 0
        if not (num_entries or slots_end):
            return
        inputs = tokens or NO_TOKENS
        more = num_entries * self._record_ints + 2 * (num_requests + 1 + inputs.bound)
        packet = self.ring.with_room(more)
        entries_at = packet.used
        copies_at = _put_records(packet, entries_at, entries.edits)
        requests_at = _put_records(packet, copies_at, entries.copies)
        placed = _put_inputs(packet, requests_at, requests, inputs)

        token_tiles = -(-slots_end // TOKEN_TILE)
        chunks = self._chunks(num_entries, entries.longest)
        # in the order of Header, which is not made here: a step pays for every object
        HEADER_STRUCT.pack_into(
            packet.buffer,
            0,
            self._num_groups,
            entries_at,
            num_edits,
            num_entries,
            requests_at,
            num_requests,
            placed.starts_at,
            placed.positions_at,
            inputs.bound,
            slots_end,
            token_tiles,
            chunks,
        )
        packet.send(placed.end)
        programs = self._num_groups * (token_tiles + num_entries * chunks)
        self._launch(packet.device_ints, placed.starts, placed.positions, programs)
        self.ring.close()
        if tokens:
            self._slots_used = inputs.bound

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

    def _chunks(self, num_entries: int, longest: int) -> int:
        """Return how many programs share a record's columns; any number would be right."""
        columns = longest * self._max_split
        if columns <= COLUMN_TILE:
            return 1
        most = MAX_COLUMN_PROGRAMS // (num_entries * self._num_groups)
        return max(1, min(-(-columns // COLUMN_TILE), most))


def _put_records(packet: Packet, at: int, records: IntArray) -> int:
    """Write records; return where they end."""
    if not len(records):
        return at
    end = at + records.size
    packet.ints[at:end] = records.reshape(-1)
    return end


def _put_inputs(packet: Packet, at: int, requests: IntArray, tokens: Tokens) -> _Inputs:
    """Write the requests, and what of the tokens is on the host."""
    end = at + len(requests)
    packet.ints[at:end] = requests
    starts, starts_at = tokens.starts, 0
    if isinstance(starts, np.ndarray):
        starts_at, end = end, end + len(starts)
        packet.ints[starts_at:end] = starts
        starts = packet.device_ints
    positions, positions_at = tokens.positions, 0
    if isinstance(positions, np.ndarray):
        positions_at = (end + 1) // 2
        positions_end = positions_at + tokens.bound
        packet.longs[positions_at:positions_end] = positions[: tokens.bound]
        positions, end = packet.device_longs, 2 * positions_end
    return _Inputs(starts, starts_at, positions, positions_at, end)
