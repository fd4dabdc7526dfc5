"""Checks what callers hand over, once, at the public border; nothing behind it checks again.

Every function either returns what was asked for, in the one form that the tables work
with, or raises an error that names the argument and says what to do.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, SupportsIndex, TypeAlias

import numpy as np
import torch

from bt_width import (
    BlockTableLayout,
    InvalidEditError,
    InvalidSpecError,
    RowOverflowError,
    ServingLimits,
    WidthMismatchError,
)

from ._packet import NOWHERE, IntArray

HostArray: TypeAlias = IntArray | torch.Tensor
"""Ints on the host: a NumPy array or a CPU tensor."""

INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
INTP = np.dtype(np.intp)
UINT32 = np.dtype(np.uint32)
_TORCH_DTYPES = {INT32: torch.int32, INT64: torch.int64}
_MAX_INT32 = 2**31 - 1
_SHOWN = 80


def shown(value: object) -> str:
    """Return a value as an error shows it: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def int_between(name: str, value: SupportsIndex, low: int, high: int) -> int:
    """Return ``value`` as an int in ``low..high``."""
    if type(value) is int and low <= value <= high:
        return value
    try:
        index = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):
        # torch raises the latter where a tensor has no data
        index = None
    if index is None or not low <= index <= high:
        raise InvalidEditError(
            f"{name} must be an int in {low}..{high}, not {shown(value)}",
            argument=name,
            value=value,
            low=low,
            high=high,
        )
    return index


def host_array(name: str, value: HostArray, dtype: np.dtype[Any], dims: int) -> IntArray:
    """Return ``value`` as a NumPy array, which shares its memory."""
    if type(value) is np.ndarray and value.dtype is dtype and value.ndim == dims:
        return value
    array = value if type(value) is np.ndarray else _from_tensor(name, value, dtype)
    if array.dtype != dtype or array.ndim != dims:
        raise WidthMismatchError(
            f"{name} must be {dims}-dimensional {dtype}, not {array.ndim}-dimensional "
            f"{array.dtype}",
            argument=name,
            dtype=str(array.dtype),
            dims=array.ndim,
        )
    return array


def _from_tensor(name: str, value: object, dtype: np.dtype[Any]) -> IntArray:
    if not isinstance(value, torch.Tensor):
        raise WidthMismatchError(
            f"{name} must be a NumPy array or a CPU tensor, not {type(value).__name__}; "
            f"hand over np.array({name}, dtype=np.{dtype})",
            argument=name,
        )
    if not value.is_cpu:
        raise WidthMismatchError(
            f"{name} must be on the host, not on {value.device}: keep the array that it was "
            "copied from, because reading it back would wait for the device",
            argument=name,
            device=str(value.device),
        )
    return value.detach().numpy()


class Tokens(NamedTuple):
    """What a launch maps to slots; arrays are on the host, tensors on the device.

    Attributes:
        starts: First token of each request and the end of the last, [N + 1] int32; on the
            device what follows is not read.
        positions: Place of each token in its request, int64.
        bound: No token at or above it is real; the number of real ones where the
            starts are on the host.
    """

    starts: IntArray | torch.Tensor
    positions: IntArray | torch.Tensor
    bound: int


NO_TOKENS = Tokens(np.zeros(1, np.int32), np.empty(0, np.int64), 0)


def _check_starts(starts: IntArray) -> None:
    """Refuse query starts that do not begin with 0, or fall."""
    if starts[0]:
        raise InvalidEditError(
            f"query_start_loc begins with {starts[0]}; the first request's tokens start at 0",
            start=int(starts[0]),
        )
    falls = np.flatnonzero(starts[1:] < starts[:-1])
    if falls.size:
        fall = int(falls[0]) + 1
        raise InvalidEditError(
            f"query_start_loc falls from {starts[fall - 1]} to {starts[fall]} at {fall}; each "
            "request's tokens start where the last one's end",
            place=fall,
            start=int(starts[fall]),
        )


def vector(
    name: str, value: HostArray, dtype: np.dtype[Any], device: torch.device
) -> IntArray | torch.Tensor:
    """Return a vector: as a NumPy array where it is on the host, else as it is."""
    # a tensor's type is asked last: that costs more than the rest
    if type(value) is np.ndarray or not isinstance(value, torch.Tensor) or value.is_cpu:
        return host_array(name, value, dtype, 1)
    if (
        value.device != device
        or value.dtype != _TORCH_DTYPES[dtype]
        or value.dim() != 1
        or (value.numel() > 1 and value.stride(0) != 1)
    ):
        raise WidthMismatchError(
            f"{name} must be a one-dimensional {dtype} tensor without gaps on {device} or on "
            f"the host, not {value.dtype} of shape {tuple(value.shape)} and stride "
            f"{value.stride()} on {value.device}",
            argument=name,
        )
    return value


def check_layouts(layouts: Sequence[BlockTableLayout]) -> tuple[BlockTableLayout, ...]:
    """Return the plans of a set of tables, which are made for the same limits."""
    if isinstance(layouts, BlockTableLayout):
        raise InvalidSpecError("layouts must be a list of layouts, one a group; hand over [layout]")
    if not isinstance(layouts, Sequence) or not layouts:
        raise InvalidSpecError(
            f"layouts must be a list of layouts, one a group and at least one, not "
            f"{shown(layouts)}",
            value=layouts,
        )
    for group, layout in enumerate(layouts):
        if not isinstance(layout, BlockTableLayout):
            raise InvalidSpecError(
                f"the layout of group {group} must be a BlockTableLayout, not {shown(layout)}",
                group=group,
            )
        if layout.limits != layouts[0].limits:
            raise InvalidSpecError(
                f"group {group} is planned for {layout.limits}, group 0 for "
                f"{layouts[0].limits}; plan all groups of a table for the same limits",
                group=group,
            )
        if layout.tokens_per_block > _MAX_INT32:
            raise InvalidSpecError(
                f"a block of group {group} holds {layout.tokens_per_block} tokens over all "
                "ranks; that must stay below 2^31",
                group=group,
                tokens_per_block=layout.tokens_per_block,
            )
    return tuple(layouts)


class EditArrays(NamedTuple):
    """The blocks that many rows get.

    Attributes:
        rows: Who gets them, [M] int32; a row may repeat.
        counts: Ids of each row and group, [M, G] int32.
        ids: Flat int32: row by row, within a row group by group.
        ends: Where in the ids each row's and group's end, flat int32.
    """

    rows: IntArray
    counts: IntArray
    ids: IntArray
    ends: IntArray


_FEW_IDS = 32
"""As many ids are looked at one by one faster than as an array."""


class EditChecks:
    """Checks of what edits and batches name; they change nothing.

    Attributes:
        blocks_per_row: Blocks that a row of each group has room for.
        limits: What all groups were planned for.
    """

    def __init__(
        self, layouts: Sequence[BlockTableLayout], num_blocks: Sequence[int] | None
    ) -> None:
        """Check against these plans and pools."""
        self._layouts = tuple(layouts)
        self.limits: ServingLimits = layouts[0].limits
        self._max_row = self.limits.max_num_reqs - 1
        self.blocks_per_row = [layout.addressing.blocks_per_row for layout in layouts]
        self._max_ids = _max_ids(self._layouts, num_blocks)
        self._good_starts = b""
        # more counts, each of which a row has room for, may add up to more than an int32
        self._max_sum = _MAX_INT32 // max(self.blocks_per_row)
        self._max_id_of_any = min(self._max_ids)
        # an array, which is faster to compare with than a scalar
        self._max_id_of_all = np.array(self._max_id_of_any, np.uint32)

    def row(self, row: SupportsIndex, name: str = "row") -> int:
        """Return ``row`` if the table has it."""
        if type(row) is int and 0 <= row <= self._max_row:
            return row
        return int_between(name, row, 0, self._max_row)

    def group(self, group: SupportsIndex) -> int:
        """Return ``group`` if there is one."""
        return int_between("group", group, 0, len(self._layouts) - 1)

    def num_reqs(self, name: str, count: SupportsIndex, low: int = 0) -> int:
        """Return a number of requests, of at least the ``low`` that the batch has."""
        most = self.limits.max_num_reqs
        if low > most:
            int_between("the number of requests", low, 0, most)
        return int_between(name, count, low, most)

    def num_tokens(self, name: str, count: SupportsIndex) -> int:
        """Return a number of tokens."""
        return int_between(name, count, 0, self.limits.max_num_batched_tokens)

    def rows(self, rows: IntArray) -> None:
        """Refuse rows that the table does not have."""
        for row in rows.tolist():
            self.row(row)

    def edits(self, rows: HostArray, counts: HostArray, ids: HostArray) -> EditArrays:
        """Return what ids rows get; the rows and ids themselves are not looked at."""
        rows = host_array("rows", rows, INT32, 1)
        counts = host_array("counts", counts, INT32, 2)
        ids = host_array("ids", ids, INT32, 1)
        if counts.shape != (len(rows), len(self._layouts)):
            raise WidthMismatchError(
                f"counts must be [{len(rows)}, {len(self._layouts)}], not {list(counts.shape)}",
                shape=counts.shape,
            )
        ends = np.add.accumulate(counts.reshape(-1), 0, INT32)
        num_ids = ends.item(-1) if len(rows) else 0
        if len(ends) > self._max_sum:
            num_ids = int(counts.sum(dtype=INT64))
        if num_ids != len(ids):
            raise WidthMismatchError(
                f"counts add up to {num_ids}; there are {len(ids)} ids",
                counted=num_ids,
                num_ids=len(ids),
            )
        return EditArrays(rows, counts, ids, ends)

    def tokens(
        self,
        starts: HostArray,
        positions: HostArray,
        num_requests: int,
        num_padded: int,
        device: torch.device,
    ) -> Tokens:
        """Check the tokens of a step; what is on the device is not read.

        Args:
            starts: ``query_start_loc``; it may be padded with its end behind N + 1 elements.
            positions: Place of each token in its request.
            num_requests: N.
            num_padded: ``num_tokens_padded``, which was checked.
            device: Where the tables lie.
        """
        starts = vector("query_start_loc", starts, INT32, device)
        positions = vector("positions", positions, INT64, device)
        if len(starts) <= num_requests:
            raise WidthMismatchError(
                f"query_start_loc must have {num_requests + 1} elements for {num_requests} "
                f"requests, not {len(starts)}",
                num_requests=num_requests,
                length=len(starts),
            )
        if not num_requests:
            # an empty batch has no tokens, whatever the starts say
            return NO_TOKENS._replace(positions=positions)
        if not isinstance(starts, np.ndarray):
            return Tokens(starts, positions, min(num_padded, len(positions)))
        key = starts.tobytes()
        if key != self._good_starts:
            _check_starts(starts)
            self._good_starts = key
        num_tokens = starts.item(num_requests)
        if len(starts) > num_requests + 1:
            if starts[-1] != num_tokens:
                raise WidthMismatchError(
                    f"query_start_loc has {len(starts)} elements for {num_requests} requests; "
                    f"those behind the first {num_requests + 1} may only repeat the end, "
                    f"{num_tokens}",
                    num_requests=num_requests,
                    length=len(starts),
                )
            starts = starts[: num_requests + 1]
        if num_tokens > num_padded:
            raise InvalidEditError(
                f"num_tokens_padded is {num_padded}, which is less than the {num_tokens} tokens "
                "of the batch",
                num_tokens_padded=num_padded,
                num_tokens=num_tokens,
            )
        if num_tokens > len(positions):
            raise InvalidEditError(
                f"{len(positions)} positions for {num_tokens} tokens; give each token its position",
                num_positions=len(positions),
                num_tokens=num_tokens,
            )
        return Tokens(starts, positions, num_tokens)

    def requests(self, requests: IntArray) -> None:
        """Refuse a batch that names a row the table does not have."""
        bad = np.flatnonzero((requests < NOWHERE) | (requests > self._max_row))
        if bad.size:
            request, row = int(bad[0]), int(requests[bad[0]])
            raise InvalidEditError(
                f"idx_mapping[{request}] is {row}; it must be a row in 0..{self._max_row}, or "
                f"{NOWHERE} for padding",
                request=request,
                row=row,
                max_row=self._max_row,
            )

    def prefix(self, row: int, group: int, num_blocks: SupportsIndex, held: int) -> int:
        """Return ``num_blocks`` if a row that holds ``held`` blocks has as many to null."""
        count = int_between("num_blocks", num_blocks, 0, _MAX_INT32)
        if count > held:
            raise RowOverflowError(
                f"cannot null {count} blocks of row {row} in group {group}: it has {held}",
                row=row,
                group=group,
                num_blocks=count,
                held=held,
            )
        return count

    def listed_ids(
        self, row: int, block_ids: Sequence[Sequence[int]], held: list[int]
    ) -> tuple[list[int], list[int] | IntArray]:
        """Return the ids that a row gets behind what it holds, one sequence a group.

        Returns:
            How many blocks it holds then, by group, and all ids, group by group: a list of
            its own, or an int32 array where there are many.
        """
        totals: list[int] = []
        found: list[int] = []
        most = self.blocks_per_row
        try:
            for group, of_group in enumerate(block_ids):
                total = held[group] + len(of_group)
                if total > most[group]:
                    return self._many_ids(row, block_ids, held)
                totals.append(total)
                found.extend(of_group)
        except (TypeError, IndexError):
            # one that is not a sequence, or more of them than groups
            return self._many_ids(row, block_ids, held)
        if len(found) > _FEW_IDS or len(totals) != len(held):
            return self._many_ids(row, block_ids, held)
        max_id = self._max_id_of_any
        for block_id in found:
            if type(block_id) is not int or not 0 <= block_id <= max_id:
                return self._many_ids(row, block_ids, held)
        return totals, found

    def _many_ids(
        self, row: int, block_ids: Sequence[Sequence[int]], held: list[int]
    ) -> tuple[list[int], list[int] | IntArray]:
        """Return the same, slower for few ids and faster for many; errors are found here."""
        try:
            counts = [len(ids) for ids in block_ids]
        except TypeError:
            raise InvalidEditError(
                f"block_ids must be one sequence of ints a group, not {shown(block_ids)}",
                argument="block_ids",
                value=block_ids,
            ) from None
        if len(counts) != len(held):
            raise InvalidEditError(
                "block_ids must have one sequence of ids a group, and not "
                f"{len(counts)} for {len(held)}",
                num_sequences=len(counts),
                num_groups=len(held),
            )
        parts = [self._as_int32(row, group, ids) for group, ids in enumerate(block_ids)]
        flat = np.concatenate(parts)
        self.ids(np.array([row]), np.array([counts]), flat)
        totals = [have + count for have, count in zip(held, counts, strict=True)]
        for group, (total, most) in enumerate(zip(totals, self.blocks_per_row, strict=True)):
            if total > most:
                self.refuse_count(row, group, counts[group], held[group])
        return totals, flat

    def _as_int32(self, row: int, group: int, ids: Sequence[int]) -> IntArray:
        if isinstance(ids, np.ndarray):
            is_good = ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iu")
            if not is_good or (ids.size and not -1 <= ids.min() <= ids.max() <= _MAX_INT32):
                self._refuse_listed(row, group, ids)
            return ids.astype(np.int32)
        try:
            part = np.frombuffer(array("i", iter(ids)), np.int32)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            self._refuse_listed(row, group, ids)
        # a bool among ints is 0 or 1 by now
        if np.count_nonzero(part.view(UINT32) <= 1) and bool in map(type, ids):
            self._refuse_listed(row, group, ids)
        return part

    def _refuse_listed(self, row: int, group: int, ids: Sequence[int]) -> NoReturn:
        """Name the first of a group's ids that is not an int, or not of the pool."""
        for block_id in ids:
            try:
                index = None if isinstance(block_id, bool) else operator.index(block_id)
            except (TypeError, RuntimeError):
                index = None
            if index is None:
                raise InvalidEditError(
                    f"block ids must be ints; row {row} gets {shown(block_id)} in group {group}",
                    row=row,
                    group=group,
                    value=block_id,
                )
            self._refuse_id_outside(row, group, index)
        raise InvalidEditError(
            f"block ids must be ints; row {row} gets {shown(ids)} in group {group}",
            row=row,
            group=group,
            value=ids,
        )

    def ids(self, rows: IntArray, counts: IntArray, ids: IntArray) -> None:
        """Refuse a negative id and one that is past its group's pool.

        Args:
            rows: Who gets them, [M].
            counts: Ids of each row and group, [M, G].
            ids: Flat: row by row, within a row group by group; int32 or int64.
        """
        if ids.dtype.itemsize == UINT32.itemsize:
            # a negative int32 is a large uint32
            if not np.count_nonzero(ids.view(UINT32) > self._max_id_of_all):
                return
        elif not np.count_nonzero((ids < 0) | (ids > self._max_id_of_all)):
            return
        flat_counts = counts.reshape(-1)
        max_ids = np.repeat(np.tile(self._max_ids, len(rows)), flat_counts)
        bad = np.flatnonzero((ids < 0) | (ids > max_ids))
        if bad.size:
            place = int(np.searchsorted(flat_counts.cumsum(), bad[0], side="right"))
            row, group = divmod(place, len(self._layouts))
            self._refuse_id_outside(int(rows[row]), group, int(ids[bad[0]]))

    def _refuse_id_outside(self, row: int, group: int, block_id: int) -> None:
        most = self._max_ids[group]
        if not 0 <= block_id <= most:
            raise InvalidEditError(
                f"row {row} gets block id {block_id} in group {group}; it must lie in 0..{most}, "
                "the pool of that group",
                row=row,
                group=group,
                id=block_id,
                max_id=most,
            )

    def counts(self, rows: IntArray, counts: IntArray, totals: IntArray) -> None:
        """Refuse negative counts, and more blocks than rows have room for.

        Args:
            rows: Who gets them, [M].
            counts: Blocks they get, [M, G].
            totals: Blocks they hold then, [M, G].
        """
        bad = np.argwhere((counts < 0) | (totals > self.blocks_per_row))
        if len(bad):
            place, group = (int(part) for part in bad[0])
            count, total = int(counts[place, group]), int(totals[place, group])
            self.refuse_count(int(rows[place]), group, count, total - count)

    def refuse_count(self, row: int, group: int, count: int, held: int) -> NoReturn:
        """Say why a row cannot get as many blocks."""
        if count < 0:
            raise InvalidEditError(
                f"row {row} gets {count} blocks in group {group}; that is not a count",
                row=row,
                group=group,
                num_blocks=count,
            )
        layout, most = self._layouts[group], self.blocks_per_row[group]
        raise RowOverflowError(
            f"row {row} holds {held} blocks in group {group} and gets {count} more; a row "
            f"holds at most {most}: {layout.explain()}",
            row=row,
            group=group,
            num_blocks=count,
            held=held,
            blocks_per_row=most,
        )


def _max_ids(layouts: Sequence[BlockTableLayout], num_blocks: Sequence[int] | None) -> list[int]:
    limits = [layout.addressing.max_block_id for layout in layouts]
    if num_blocks is None:
        return limits
    try:
        pools = list(num_blocks)
    except TypeError:
        pools = []
    if len(pools) != len(layouts) or any(type(pool) is not int or pool < 1 for pool in pools):
        raise InvalidSpecError(
            f"num_blocks must be one pool size of at least 1 for each of {len(layouts)} groups, "
            f"not {shown(num_blocks)}",
            num_blocks=num_blocks,
        )
    return [min(pool - 1, limit) for pool, limit in zip(pools, limits, strict=True)]
