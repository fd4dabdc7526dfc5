"""Rows by index that live on the device: what waits, what the batch mirrors, the launch."""

from __future__ import annotations

import torch

from .._launch.arrays import IntArray
from .._launch.engine import NO_RECORDS, Entries, StepEngine
from .._launch.tokens import Tokens
from .batch import BatchMirror
from .checks import EditChecks
from .records import RowRecords
from .staging import StagedEdits

_FEW_BLOCKS = 64
"""Edits that write no more are not measured: one program writes each."""


class DeviceRows:
    """The host's side of rows that live on the device.

    Attributes:
        edits: What is staged.
    """

    def __init__(self, engine: StepEngine, records: RowRecords, checks: EditChecks) -> None:
        """Start with empty rows and a batch of none."""
        self._engine = engine
        self._records = records
        self.edits = StagedEdits(records, checks, engine.ring)
        self._mirror = BatchMirror(records, checks)

    def run(self, batch: IntArray | None, requests: IntArray, tokens: Tokens | None) -> None:
        """Launch what is staged, what moved in the batch, and the mapping of tokens.

        Args:
            batch: Rows in batch order, [N] int32, or None to leave the batch as it is.
            requests: The row of each request of ``tokens``, [N] int32.
            tokens: The tokens to map, or None to leave the slots alone.

        Raises:
            InvalidEditError: The batch names a row that there is not.
        """
        records, staged = self._records, self.edits
        if batch is not None:
            moves = self._mirror.moves(batch)
        else:
            moves = self._mirror.repeats() if staged.num_edits else None
        rows = staged.rows
        edits = records.ints.take(rows, axis=0) if staged.num_edits else NO_RECORDS
        copies, longest = NO_RECORDS, staged.longest
        if moves is not None:
            copies, longest = moves, records.longest_row
        if longest > _FEW_BLOCKS:
            longest = records.longest(edits, copies)
        try:
            self._engine.run(Entries(edits, copies, longest), requests, tokens)
        except BaseException:
            self._engine.await_packet()
            self.forget()
            raise
        if staged.num_edits:
            records.settle(rows, edits)
            staged.clear()
        if moves is not None:
            self._mirror.settle(moves)

    def null_prefix(self, row: int, group: int, num_blocks: int) -> None:
        """Stage that a row's first blocks are null; the count was checked."""
        self.edits.null_prefix(row, group, num_blocks)

    def forget(self) -> None:
        """Any batch row and any slot may hold anything from now on."""
        self._mirror.forget()
        self._engine.forget_slots()

    def restore(self) -> None:
        """Write the facts and null the columns without a block, where they lie."""
        storage, records = self._engine.storage, self._records
        storage.fill_groups()
        for group, facts in enumerate(storage.facts):
            starts, ends = (
                torch.from_numpy(records.ints[:, field][:, group] * facts.split)
                for field in (records.nulled_before, records.blocks_before)
            )
            device = self._engine.device
            storage.null_outside(group, starts.to(device), ends.to(device))
        self.forget()
