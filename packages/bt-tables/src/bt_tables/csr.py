"""Gives a batch's tables as compressed rows, for kernels that take no padded table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from bt_width import BlockTableLayout, InvalidEditError, RowOverflowError, WidthMismatchError

from ._checks import INT32, INT64, HostArray, host_array
from ._packet import IntArray
from .devices import Executor


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
        self,
        layout: BlockTableLayout,
        table: torch.Tensor,
        lengths: IntArray,
        out: CsrTable | None,
        *,
        tokens: bool,
    ) -> CsrTable:
        """Return the ids of each request, or the slots of its tokens.

        Args:
            layout: The group's plan.
            table: The batch's rows, [N, W] int32.
            lengths: Tokens of each request that this rank keeps, [N] int64; they were checked.
            out: What to write to.
            tokens: Whether to return slots.

        Raises:
            RowOverflowError: The lengths add up to more than int32 counts.
            WidthMismatchError: ``out`` has no room, another dtype or another device.
        """
        size = layout.kernel_block_size
        num_columns = -(-lengths // size)
        if tokens:
            num_elements, last_block_len = lengths, np.minimum(lengths, 1)
        else:
            num_elements = num_columns
            last_block_len = lengths - np.maximum(num_columns - 1, 0) * size
        indptr = np.concatenate((np.zeros(1, np.int64), num_elements.cumsum()))
        num_indices = int(indptr[-1])
        if num_indices >= 2**31:
            raise RowOverflowError(
                f"{num_indices} elements are more than an int32 indptr can count",
                num_elements=num_indices,
            )
        dtype = torch.int64 if tokens else torch.int32
        if out is None:
            out = CsrTable(
                self._executor.empty(len(indptr), torch.int32),
                self._executor.empty(num_indices, dtype),
                self._executor.empty(len(lengths), torch.int32),
            )
        else:
            self._check_out(out, len(lengths), num_indices, dtype)
        # requests behind the batch have no ids: whoever reads the whole buffers finds none
        self._send(out.indptr, indptr, num_indices)
        self._send(out.last_block_len, last_block_len, 0)
        if num_indices:
            per_column = size if tokens else 0
            self._launch(table, out.indptr, out.indices, num_indices, per_column)
        return out

    def _send(self, destination: torch.Tensor, values: IntArray, padding: int) -> None:
        # host memory of its own, not written again while it is read
        host = self._executor.host_ints(len(destination))
        host.numpy()[: len(values)] = values
        host.numpy()[len(values) :] = padding
        self._executor.copy(destination, host)

    def _check_out(
        self, out: CsrTable, num_reqs: int, num_indices: int, dtype: torch.dtype
    ) -> None:
        if not isinstance(out, CsrTable):
            raise WidthMismatchError(
                f"out must be a CsrTable of buffers, not {type(out).__name__}", argument="out"
            )
        least = CsrTable(num_reqs + 1, num_indices, num_reqs)  # type: ignore[arg-type]  # counts
        dtypes = (torch.int32, dtype, torch.int32)
        for name, buffer, count, wanted in zip(out._fields, out, least, dtypes, strict=True):
            if (
                not isinstance(buffer, torch.Tensor)
                or buffer.dtype != wanted
                or buffer.device != self._executor.device
                or buffer.dim() != 1
                or not buffer.is_contiguous()
                or buffer.numel() < count
            ):
                found = (
                    f"{buffer.dtype} of shape {tuple(buffer.shape)} on {buffer.device}"
                    if isinstance(buffer, torch.Tensor)
                    else type(buffer).__name__
                )
                raise WidthMismatchError(
                    f"out.{name} must be {wanted} without gaps on {self._executor.device}, at "
                    f"least {count} elements long, not {found}",
                    argument=name,
                    num_elements=count,
                )


def read_lengths(
    seq_lens: HostArray, held: IntArray, layout: BlockTableLayout, group: int
) -> IntArray:
    """Return the lengths of a batch's requests, [N] int64.

    Args:
        seq_lens: Tokens of each request that this rank keeps, at least N.
        held: Blocks that each request's row holds, [N].
        layout: The group's plan.
        group: The group.

    Raises:
        InvalidEditError: The group's blocks do not follow one another, or a length is
            negative.
        RowOverflowError: A length is past the blocks of its row.
        WidthMismatchError: ``seq_lens`` is not a vector of ints, or too short.
    """
    if layout.slot_mode != "block":
        raise InvalidEditError(
            f"a group of kind {layout.kind} has no blocks that follow one another",
            group=group,
            kind=layout.kind,
        )
    is_long = getattr(seq_lens, "dtype", None) in (INT64, torch.int64)
    lengths = host_array("seq_lens", seq_lens, INT64 if is_long else INT32, 1)
    num_reqs = len(held)
    if len(lengths) < num_reqs:
        raise WidthMismatchError(
            f"seq_lens has {len(lengths)} lengths for {num_reqs} requests",
            num_lengths=len(lengths),
            num_reqs=num_reqs,
        )
    lengths = lengths[:num_reqs].astype(np.int64)
    capacity = held.astype(np.int64) * layout.block_size
    bad = np.flatnonzero((lengths < 0) | (lengths > capacity))
    if bad.size:
        request = int(bad[0])
        length, blocks = int(lengths[request]), int(held[request])
        if length < 0:
            raise InvalidEditError(
                f"seq_lens[{request}] is {length}; it must be a count of tokens",
                request=request,
                seq_len=length,
            )
        over_ranks = (
            "; seq_lens counts the tokens that this rank keeps, layout.local_length(length)"
            if layout.shards > 1
            else "; seq_lens counts the tokens of each request up to and with this step"
        )
        raise RowOverflowError(
            f"seq_lens[{request}] is {length}, but request {request} holds {blocks} blocks of "
            f"{layout.block_size} tokens in group {group}, which is {int(capacity[request])} "
            f"tokens{over_ranks}",
            request=request,
            group=group,
            seq_len=length,
            held=blocks,
            capacity=int(capacity[request]),
        )
    return lengths
