"""A batch's tables as compressed rows, for kernels that take no padded table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from bt_width import BlockTableLayout, InvalidEditError, RowOverflowError, WidthMismatchError

from ._launch.arrays import INT32, INT64, HostArray, IntArray, host_array
from ._launch.executor import Executor


class CsrTable(NamedTuple):
    """The ids of each request, one request after the other, on the tables' device.

    Attributes:
        indptr: Where each request's ids start, and the end of the last, [N + 1] int32.
        indices: Kernel-block ids, int32; slots where the table is of tokens, int64.
        last_block_len: Tokens of each request in its last block, [N] int32; 0 where it
            has none.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_block_len: torch.Tensor


class CsrGatherer:
    """Gathers the ids of a batch; it knows tables, not how they came about."""

    def __init__(self, executor: Executor) -> None:
        """Gather on ``executor``'s device."""
        self._executor = executor
        self._launch = executor.csr_launch()

    def gather(
        self, layout: BlockTableLayout, table: torch.Tensor, seq_lens: HostArray, *, tokens: bool
    ) -> CsrTable:
        """Return the ids of each request, or the slots of its tokens.

        Args:
            layout: The group's plan.
            table: The batch's rows, [N, W] int32.
            seq_lens: Tokens of each request that this rank keeps, at least [N] ints on
                the host.
            tokens: Whether to return slots.

        Raises:
            InvalidEditError: The group's blocks do not follow one another, or a length is
                negative.
            RowOverflowError: A length is past the width.
            WidthMismatchError: ``seq_lens`` is no vector of ints, or too short.
        """
        lengths = _read_lengths(seq_lens, len(table), layout)
        size = layout.kernel_block_size
        num_columns = -(-lengths // size)
        last_block_len = lengths - np.maximum(num_columns - 1, 0) * size
        if tokens:
            num_elements, last_block_len = lengths, np.minimum(lengths, 1)
        else:
            num_elements = num_columns
        indptr = np.concatenate((np.zeros(1, np.int64), num_elements.cumsum()))
        if indptr[-1] >= 2**31:
            raise RowOverflowError(
                f"{indptr[-1]} elements are more than an int32 indptr can count",
                num_elements=int(indptr[-1]),
            )
        sent = self._send(np.concatenate((indptr, last_block_len)))
        starts, last = sent[: len(table) + 1], sent[len(table) + 1 :]
        dtype = torch.int64 if tokens else torch.int32
        indices = torch.empty(int(indptr[-1]), dtype=dtype, device=self._executor.device)
        if indices.numel():
            self._launch(table, starts, indices, size if tokens else 0)
        return CsrTable(starts, indices, last)

    def _send(self, values: IntArray) -> torch.Tensor:
        # host memory of its own, which nobody writes again while it is read
        host = self._executor.host_ints(len(values))
        host.numpy()[:] = values
        sent = self._executor.empty(len(values), torch.int32)
        self._executor.copy(sent, host)
        return sent


def _read_lengths(seq_lens: HostArray, num_reqs: int, layout: BlockTableLayout) -> IntArray:
    if layout.slot_mode != "block":
        raise InvalidEditError(
            f"a group of kind {layout.kind} has no blocks that follow one another",
            kind=layout.kind,
        )
    is_long = getattr(seq_lens, "dtype", None) in (INT64, torch.int64)
    lengths = host_array("seq_lens", seq_lens, INT64 if is_long else INT32, 1)
    if len(lengths) < num_reqs:
        raise WidthMismatchError(
            f"seq_lens has {len(lengths)} lengths for {num_reqs} requests",
            num_lengths=len(lengths),
            num_reqs=num_reqs,
        )
    lengths = lengths[:num_reqs].astype(np.int64)
    capacity = layout.width * layout.kernel_block_size
    bad = lengths[(lengths < 0) | (lengths > capacity)]
    if bad.size and bad[0] < 0:
        raise InvalidEditError(
            f"seq_lens must hold counts of tokens, not {bad[0]}", seq_len=int(bad[0])
        )
    if bad.size:
        raise RowOverflowError(
            f"{bad[0]} tokens are more than the {capacity} of a row: {layout.explain()}",
            seq_len=int(bad[0]),
            capacity=capacity,
        )
    return lengths
