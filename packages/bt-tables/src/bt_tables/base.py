"""What both table classes share: their making, and the calls that do not name a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bt_width import BlockTableLayout, InvalidSpecError

from ._checks import INTP, UINT32, HostArray, check_layouts, shown
from ._packet import IntArray
from ._rows import DeviceRows
from .csr import CsrGatherer, CsrTable, read_lengths
from .devices import Executor, executor_for

_MAX_PACKETS = 1024
"""Steps in flight that no engine needs: a slip, and one packet of host memory each."""


class BlockTables:
    """Tables of one or more groups on a device, not to be made but as a table class."""

    _launches_a_step = 1

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
            layouts: One plan a group, all of the same limits; at least one.
            device: Where the tables lie.
            num_blocks: The pool of each group, block 0 included; without it only ids
                whose kernel-block ids leave int32 are refused.
            max_steps_in_flight: Steps whose packets may wait to be read by the device.

        Raises:
            InvalidSpecError: An argument is out of its range, the layouts are planned for
                different limits, or the tables need more memory than there is.
        """
        if type(max_steps_in_flight) is not int or not 1 <= max_steps_in_flight <= _MAX_PACKETS:
            raise InvalidSpecError(
                f"max_steps_in_flight must be an int in 1..{_MAX_PACKETS}, each of which takes "
                f"host memory, not {shown(max_steps_in_flight)}",
                max_steps_in_flight=max_steps_in_flight,
                max_packets=_MAX_PACKETS,
            )
        plans = check_layouts(layouts)
        executor = executor_for(device)
        self._executor = executor
        self._rows = DeviceRows(
            plans, executor, num_blocks, num_packets=max_steps_in_flight * self._launches_a_step
        )
        self._checks = self._rows.checks
        self._storage = self._rows.storage
        self._gatherer = CsrGatherer(executor)

    @property
    def layouts(self) -> tuple[BlockTableLayout, ...]:
        """The plan of each group: the very objects the tables were made from."""
        return self._storage.layouts

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        return self._executor.device

    def _stage(
        self,
        rows: HostArray,
        counts: HostArray,
        ids: HostArray,
        *,
        overwrite: bool,
        order: IntArray | None = None,
    ) -> None:
        """Give rows more blocks; ``order`` says where on the device each of them lies."""
        edits = self._checks.edits(rows, counts, ids)
        try:
            # a negative row is far past any end, and an index of it fails
            index = edits.rows.view(UINT32)
            index = (index if order is None else order.take(index)).astype(INTP)
            self._rows.stage(index, edits, replace=bool(overwrite))
        except IndexError:
            self._checks.rows(edits.rows)
            raise

    def invalidate(self) -> None:
        """Write every batch row and every slot anew at the next launch, whatever it holds.

        For when a caller wrote to what a call returned. A launch that failed, or that
        was interrupted, is noticed without it: the next call writes all that is in doubt.
        """
        self._rows.invalidate()

    def rebind(self) -> None:
        """Make the tables whole after their memory was released and mapped again.

        What a launch needs to know is written anew now, batch rows and slots at the next
        launch. Rows live on the device alone and hold what the memory kept of their ids:
        where that is nothing, replace or clear them.
        """
        self._rows.restore()

    def warmup(self) -> None:
        """Compile what steps launch, so that none of them has to; nothing changes."""
        self._rows.warm_up()
        for group, layout in enumerate(self.layouts):
            if layout.slot_mode == "block":
                (table, length) = self._storage.block_tables(1)[group], np.ones(1, np.int64)
                for tokens in (False, True):
                    self._gatherer.gather(layout, table, length, None, tokens=tokens)
        self._executor.synchronize()

    def gather_csr(
        self, group: int, seq_lens: HostArray, num_reqs: int, *, out: CsrTable | None = None
    ) -> CsrTable:
        """Return the kernel-block ids of the current batch, request after request.

        How many a request has comes from its length, not from the blocks of its row: one
        that was allocated early does not lengthen it.

        Args:
            group: The cache group.
            seq_lens: Tokens of each request that this rank keeps (``local_length``), at
                least [num_reqs] ints on the host.
            num_reqs: Requests of the batch.
            out: Buffers to write to, which a CUDA graph may have captured; what lies behind
                the batch is an empty request in ``indptr`` and ``last_block_len``, and left
                alone in ``indices``.

        Returns:
            New tensors of exactly the batch's size, or ``out``.

        Raises:
            InvalidEditError: The group, the count or a length is bad, or the group's
                blocks do not follow one another.
            RowOverflowError: A length is past the blocks that its row holds.
            WidthMismatchError: ``seq_lens`` is not a vector of ints, or too short; a buffer
                is too small or of a wrong dtype or device.
        """
        return self._gather(group, seq_lens, num_reqs, out, tokens=False)

    def gather_token_csr(
        self, group: int, seq_lens: HostArray, num_reqs: int, *, out: CsrTable | None = None
    ) -> CsrTable:
        """Return the slots of the current batch's tokens, for kernels of block size 1.

        Arguments and errors are those of ``gather_csr``; a token in a null block has
        ``PAD_SLOT``.
        """
        return self._gather(group, seq_lens, num_reqs, out, tokens=True)

    def _gather(
        self, group: int, seq_lens: HostArray, num_reqs: int, out: CsrTable | None, *, tokens: bool
    ) -> CsrTable:
        group = self._checks.group(group)
        num_reqs = self._checks.num_reqs("num_reqs", num_reqs)
        layout, held = self.layouts[group], self._rows.batch_blocks(num_reqs, group)
        lengths = read_lengths(seq_lens, held, layout, group)
        table = self._storage.block_tables(num_reqs)[group]
        return self._gatherer.gather(layout, table, lengths, out, tokens=tokens)
