"""What both tables share: their making, and the calls that do not depend on where rows live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
import torch

from bt_width import BlockTableLayout, InvalidSpecError

from ._launch.arrays import HostArray, int_between
from ._launch.engine import StepEngine
from ._launch.executor import Executor
from ._rows.checks import EditChecks
from ._rows.records import RowRecords
from .csr import CsrGatherer, CsrTable
from .devices import executor_for

_MAX_PACKETS = 1024
"""Steps in flight that no engine needs: a slip, and one packet of host memory each."""


class TableRows(Protocol):
    """A table's rows, wherever they live; arguments were checked."""

    def null_prefix(self, row: int, group: int, num_blocks: int) -> None:
        """Null a row's first blocks."""
        ...

    def forget(self) -> None:
        """Any batch row and any slot may hold anything from now on."""
        ...

    def restore(self) -> None:
        """Write what a launch needs to memory that was released and mapped again."""
        ...


class BlockTables(ABC):
    """Tables of one or more groups on a device."""

    _rows_are_batch: ClassVar[bool]
    _rows: TableRows

    def __init__(
        self,
        layouts: Sequence[BlockTableLayout],
        *,
        device: str | torch.device | Executor,
        num_blocks: Sequence[int] | None = None,
        max_steps_in_flight: int = 2,
    ) -> None:
        """Allocate empty tables.

        Args:
            layouts: One plan a group, all of the same limits.
            device: Where the tables lie.
            num_blocks: The pool of each group, block 0 included; without it only ids
                whose kernel-block ids leave int32 are refused.
            max_steps_in_flight: Steps whose packets may wait to be read by the device.

        Raises:
            InvalidSpecError: An argument is no such number, or the layouts are planned
                for different limits.
        """
        if type(max_steps_in_flight) is not int or not 1 <= max_steps_in_flight <= _MAX_PACKETS:
            raise InvalidSpecError(
                f"max_steps_in_flight must be an int in 1..{_MAX_PACKETS}, each of which takes "
                f"host memory, not {max_steps_in_flight!r}",
                max_steps_in_flight=max_steps_in_flight,
                max_packets=_MAX_PACKETS,
            )
        executor = executor_for(device)
        self._gatherer = CsrGatherer(executor)
        self._engine = StepEngine(
            layouts,
            executor,
            # rows in batch order take two launches a step: a commit and the slots
            num_packets=max_steps_in_flight * (2 if self._rows_are_batch else 1),
            rows_are_batch=self._rows_are_batch,
        )
        storage = self._engine.storage
        self._max_reqs = storage.limits.max_num_reqs
        self._max_tokens = storage.limits.max_num_batched_tokens
        self._checks = EditChecks(storage.layouts, storage.limits.max_num_reqs, num_blocks)
        self._records = RowRecords(storage.num_rows, self._checks.blocks_per_row)
        self._rows = self._make_rows()

    @abstractmethod
    def _make_rows(self) -> TableRows:
        """Return empty rows."""

    @property
    def layouts(self) -> tuple[BlockTableLayout, ...]:
        """The plan of each group: the very objects the tables were made from."""
        return self._engine.storage.layouts

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        return self._engine.device

    def null_prefix(self, row: int, group: int, num_blocks: int) -> None:
        """Null a row's first blocks until it is replaced or cleared.

        Args:
            row: The row.
            group: The cache group.
            num_blocks: Blocks from the start of the row, in total: never fewer than an
                earlier call said.

        Raises:
            InvalidEditError: The row, the group or the count is none.
            RowOverflowError: The row has fewer blocks.
        """
        row, group = self._checks.row(row), self._checks.group(group)
        held = int(self._records.ints[row, self._records.blocks][group])
        self._rows.null_prefix(row, group, self._checks.prefix(row, group, num_blocks, held))

    def invalidate(self) -> None:
        """Write every batch row and every slot anew at the next launch, whatever it holds.

        For when somebody else wrote to what a call returned, or a launch failed.
        """
        self._rows.forget()

    def rebind(self) -> None:
        """Make the tables whole after their memory was released and mapped again.

        What a launch needs to know is written anew, and batch rows and slots are at the next
        launch. Rows in batch order come back from the host. Rows by request index hold what
        the memory kept of their ids: where that is nothing, replace or clear the row.
        """
        self._rows.restore()

    def warmup(self) -> None:
        """Compile what steps launch, so that none of them has to; nothing changes."""
        if self.layouts:
            self._engine.launch_nothing()
        for group, layout in enumerate(self.layouts):
            if layout.slot_mode == "block":
                length = np.ones(1, np.int32)
                self.gather_csr(group, length, 1)
                self.gather_token_csr(group, length, 1)

    def gather_csr(self, group: int, seq_lens: HostArray, num_reqs: int) -> CsrTable:
        """Return the kernel-block ids of the current batch, request after request.

        How many a request has comes from its length, not from the blocks of its row: one
        that was allocated early does not lengthen it.

        Args:
            group: The cache group.
            seq_lens: Tokens of each request that this rank keeps (``local_length``), at
                least [num_reqs] ints on the host.
            num_reqs: Requests of the batch.

        Raises:
            InvalidEditError: The group, the count or a length is bad, or the group's
                blocks do not follow one another.
            RowOverflowError: A length is past the width.
            WidthMismatchError: ``seq_lens`` is no vector of ints, or too short.
        """
        return self._gather(group, seq_lens, num_reqs, tokens=False)

    def gather_token_csr(self, group: int, seq_lens: HostArray, num_reqs: int) -> CsrTable:
        """Return the slots of the current batch's tokens, for kernels of block size 1.

        Arguments and errors are those of ``gather_csr``; a token in a null block has
        ``PAD_SLOT``.
        """
        return self._gather(group, seq_lens, num_reqs, tokens=True)

    def _gather(self, group: int, seq_lens: HostArray, num_reqs: int, *, tokens: bool) -> CsrTable:
        group = self._checks.group(group)
        num_reqs = int_between("num_reqs", num_reqs, 0, self._max_reqs)
        table = self._engine.storage.block_tables(num_reqs)[group]
        return self._gatherer.gather(self.layouts[group], table, seq_lens, tokens=tokens)

    # steps call both: an int in its range costs a comparison, anything else a closer look

    def _padded_reqs(self, num_padded: int, num_reqs: int) -> int:
        if type(num_padded) is int and num_reqs <= num_padded <= self._max_reqs:
            return num_padded
        return int_between("num_reqs_padded", num_padded, num_reqs, self._max_reqs)

    def _padded_tokens(self, num_padded: int) -> int:
        if type(num_padded) is int and 0 <= num_padded <= self._max_tokens:
            return num_padded
        return int_between("num_tokens_padded", num_padded, 0, self._max_tokens)
