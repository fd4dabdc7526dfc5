"""The packet of a step, int by int, as the host writes it and a launch reads it.

A packet is one run of int32::

    header | edit_of_row [R] | ids | entries | requests [N] | query_start_loc [N + 1] | positions

``edit_of_row`` holds 1 + the entry that edits a row, or 0. The positions are int64
and start at an even int; they and the query starts are left out where the caller has
them on the device. An entry is a record: its row, its batch row, then each field of
``RecordField`` for every group. The first entries are edits, which write what changed
of a row and of the batch row that mirrors it; the others are copies, which write a
batch row whole.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from bt_width import Addressing

if TYPE_CHECKING:
    from .devices import Executor

IntArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

HEADER_INTS = 16
"""Ints before the row map; the header's fields and room for more."""

EDIT_OF_ROW_AT = HEADER_INTS

TOKEN_TILE = 128
"""Tokens whose slots one program maps."""

COLUMN_TILE = 512
"""Columns that one program writes at a time."""

NOWHERE = -1
"""A record's row or batch row where it has none, and a request that is padding."""


class Header(NamedTuple):
    """The first ints of a packet, in their order.

    Attributes:
        num_groups: Cache groups (G).
        entries_at: Where the first record starts.
        num_edits: Records that are edits.
        num_entries: All records, edits and copies.
        requests_at: Where the rows of the batch's requests start.
        num_requests: Requests of the batch (N).
        query_start_at: Where the query starts are, in the packet or the caller's tensor.
        positions_at: The same for the positions, counted in int64s.
        max_tokens: No token at or above it is real.
        slots_end: Slots are written up to here.
        token_tiles: Programs that map slots, for each group.
        chunks: Programs that share the columns of one record and group.
    """

    num_groups: int
    entries_at: int
    num_edits: int
    num_entries: int
    requests_at: int
    num_requests: int
    query_start_at: int
    positions_at: int
    max_tokens: int
    slots_end: int
    token_tiles: int
    chunks: int


_HEADER = struct.Struct(f"={len(Header._fields)}i")


class TableGroup(NamedTuple):
    """What a launch knows of a group: on the device int64s, the addressing's fields first.

    Attributes:
        addressing: How its rows are addressed.
        table_at: Where its table starts in the flat rows, and in the batch rows.
        slots_at: Where its slots start in the flat slots.
    """

    addressing: Addressing
    table_at: int
    slots_at: int

    def ints(self) -> tuple[int, ...]:
        """Return the group as it lies on the device."""
        return (*self.addressing, self.table_at, self.slots_at)


GROUP_FIELDS = (*Addressing._fields, *TableGroup._fields[1:])
"""The names of a group's int64s, in their order."""

ROW_AT = 0
BATCH_ROW_AT = 1
FIELDS_AT = 2


class RecordField(IntEnum):
    """What a record says of each group, in blocks, in the order of the packet.

    After the launch, block ``b`` of the row is the null block below ``NULLED``, what the
    row held before below ``KEEP``, the packet's int ``BASE + b`` below ``BLOCKS``, and
    the null block from there on. The ``_BEFORE`` fields say how far the row, or a copy's
    batch row, was filled and nulled before the launch.
    """

    BASE = 0
    KEEP = 1
    BLOCKS_BEFORE = 2
    NULLED_BEFORE = 3
    BLOCKS = 4
    NULLED = 5


class RecordForm:
    """Where a record of G groups has its ints, as slices of [M, size] and as named fields.

    Attributes:
        num_groups: G.
        size: Ints of a record.
        fields: A NumPy dtype with each field of all groups as one opaque value, and with
            ``before`` and ``after``: a copy from field to field is one short run a record.
        line: A record as one opaque value, which is scattered several times faster.
        of_groups: One field of all groups as one opaque value.
        base, keep, blocks_before, nulled_before, blocks, nulled: The columns of each field.
        after: The columns of ``blocks`` and ``nulled``.
    """

    def __init__(self, num_groups: int) -> None:
        """Lay out a record."""
        self.num_groups = num_groups
        self.size = FIELDS_AT + len(RecordField) * num_groups
        self.base = self._columns(RecordField.BASE)
        self.keep = self._columns(RecordField.KEEP)
        self.blocks_before = self._columns(RecordField.BLOCKS_BEFORE)
        self.nulled_before = self._columns(RecordField.NULLED_BEFORE)
        self.blocks = self._columns(RecordField.BLOCKS)
        self.nulled = self._columns(RecordField.NULLED)
        self.after = self._columns(RecordField.BLOCKS, fields=2)
        self.line = np.dtype((np.void, 4 * self.size))
        self.of_groups = one = np.dtype((np.void, 4 * num_groups))
        two = np.dtype((np.void, 8 * num_groups))
        at = {"before": RecordField.BLOCKS_BEFORE, "after": RecordField.BLOCKS}
        at |= {field.name.lower(): field for field in RecordField}
        self.fields = np.dtype(
            {
                "names": list(at),
                "formats": [two, two] + [one] * len(RecordField),
                "offsets": [4 * self._columns(field).start for field in at.values()],
                "itemsize": 4 * self.size,
            }
        )

    def _columns(self, field: RecordField, *, fields: int = 1) -> slice:
        start = FIELDS_AT + field * self.num_groups
        return slice(start, start + fields * self.num_groups)


_ROUND_INTS = 256


def _rounded(num_ints: int) -> int:
    """Round up to 1 KiB, so that few sizes are ever sent and their views can be kept."""
    return -(-num_ints // _ROUND_INTS) * _ROUND_INTS


class Packet:
    """A packet on the host, and where it goes on the device.

    Attributes:
        ints: The host's int32s, as NumPy sees them.
        longs: The same memory as int64s.
        edit_of_row: The row map in it, [R].
        ids_at: Where ids start.
        capacity: Ints there is room for.
        device_ints: The packet on the device.
        device_longs: The same memory as int64s.
    """

    def __init__(self, executor: Executor, num_rows: int, capacity: int) -> None:
        """Allocate both sides."""
        self._executor = executor
        self.capacity = _rounded(capacity)
        self._host = executor.host_ints(self.capacity)
        self.device_ints = executor.empty(self.capacity, torch.int32)
        self.device_longs = self.device_ints.view(torch.int64)
        self.ints = self._host.numpy()
        self.longs = self._host.view(torch.int64).numpy()
        self._buffer = self.ints.data
        self.ids_at = EDIT_OF_ROW_AT + num_rows
        self.edit_of_row = self.ints[EDIT_OF_ROW_AT : self.ids_at]
        self._fence = executor.fence()
        self._sends: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write_header(
        self,
        *,
        num_groups: int,
        entries_at: int,
        num_edits: int,
        num_entries: int,
        requests_at: int,
        num_requests: int,
        query_start_at: int,
        positions_at: int,
        max_tokens: int,
        slots_end: int,
        token_tiles: int,
        chunks: int,
    ) -> None:
        """Write the fields of ``Header``, which is not made here: a step pays for every object."""
        _HEADER.pack_into(
            self._buffer,
            0,
            num_groups,
            entries_at,
            num_edits,
            num_entries,
            requests_at,
            num_requests,
            query_start_at,
            positions_at,
            max_tokens,
            slots_end,
            token_tiles,
            chunks,
        )

    def put(self, at: int, ints: IntArray) -> int:
        """Write ints; return where they end."""
        end = at + ints.size
        self.ints[at:end] = ints if ints.ndim == 1 else ints.reshape(-1)
        return end

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


class PacketRing:
    """As many packets as launches may be in flight, filled and sent in turn.

    None is handed out again before the device has read what was last sent from it. A
    packet that is taken and never sent costs its turn and nothing else.
    """

    def __init__(self, executor: Executor, num_rows: int, depth: int, capacity: int) -> None:
        """Allocate ``depth`` packets."""
        self._executor = executor
        self._num_rows = num_rows
        self._packets = [Packet(executor, num_rows, capacity) for _ in range(depth)]
        self._turn = 0

    def take(self, other_than: Packet | None = None) -> Packet:
        """Return the next packet that the device has read; the one being filled is left out."""
        packets = self._packets
        turn = self._turn
        if packets[turn] is other_than:
            turn = (turn + 1) % len(packets)
        self._turn = (turn + 1) % len(packets)
        packets[turn].wait()
        return packets[turn]

    def with_room(self, packet: Packet, used: int, more: int) -> Packet:
        """Return the packet, or a larger one that begins with the same ``used`` ints.

        The device has read whatever was sent from the packet that is replaced.
        """
        if used + more <= packet.capacity:
            return packet
        grown = Packet(self._executor, self._num_rows, max(used + more, 2 * packet.capacity))
        grown.ints[:used] = packet.ints[:used]
        self._packets = [grown if held is packet else held for held in self._packets]
        return grown
