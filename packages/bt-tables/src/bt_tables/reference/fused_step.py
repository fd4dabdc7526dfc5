"""The twin of ``kernels.fused_step``: a whole step, group after group."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from bt_width import PAD_SLOT

from .._launch.arrays import IntArray
from .._launch.executor import StepLaunch
from .._launch.storage import Storage
from .._launch.wire import Header
from .columns import GroupView, Writes, read_records, write_columns
from .slots import map_slots, read_tokens


def step_twin(storage: Storage) -> StepLaunch:
    """Return the launch of ``fused_step`` on tables of the CPU."""

    def launch(
        packet: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, programs: int
    ) -> None:
        del programs  # a twin needs one
        fused_step(storage, packet.numpy(), starts.numpy(), positions.numpy())

    return launch


def fused_step(storage: Storage, packet: IntArray, starts: IntArray, positions: IntArray) -> None:
    """Carry out a packet: write rows and batch rows, map tokens to slots.

    Args:
        storage: The tables.
        packet: The packet, int32.
        starts: Where the query starts are, int32: the packet, or the caller's.
        positions: Where the positions are, int64: the packet, or the caller's.
    """
    work = step_work(storage, packet, starts, positions)
    storage.rows.numpy()[work.rows.places] = work.rows.values
    storage.batch.numpy()[work.batch.places] = work.batch.values
    storage.slots.numpy()[work.slots.places] = work.slots.values


class StepWork(NamedTuple):
    """All that a step's launch reads from the tables and writes to them.

    Attributes:
        rows_read: Places of the flat rows that are read.
        rows: Writes to the flat rows.
        batch: Writes to the flat batch rows.
        slots: Writes to the flat slots.
    """

    rows_read: IntArray
    rows: Writes
    batch: Writes
    slots: Writes


def step_work(
    storage: Storage, packet: IntArray, starts: IntArray, positions: IntArray
) -> StepWork:
    """Return all that a packet asks for; the arguments are those of ``fused_step``."""
    header = Header._make(packet[: len(Header._fields)].tolist())
    tokens = read_tokens(packet, header, starts, positions)
    parts = []
    for number, facts in enumerate(storage.facts):
        group = GroupView(facts, storage.rows.numpy(), packet)
        records = read_records(packet, header, number)
        columns = write_columns(group, records, header.num_edits)
        slots, slots_read = map_slots(group, records, tokens)
        padded = np.full(header.slots_end, PAD_SLOT, np.int64)
        padded[: len(slots)] = slots
        places = facts.slots_at + np.arange(header.slots_end)
        read = np.concatenate((columns.read, slots_read))
        parts.append(StepWork(read, columns.rows, columns.batch, Writes(places, padded)))
    return StepWork(
        np.concatenate([part.rows_read for part in parts]),
        _joined([part.rows for part in parts]),
        _joined([part.batch for part in parts]),
        _joined([part.slots for part in parts]),
    )


def _joined(parts: list[Writes]) -> Writes:
    return Writes(*(np.concatenate(column) for column in zip(*parts, strict=True)))
