"""Reads the arguments of a check: refuses what does not describe a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bt_width import Addressing, InvalidEditError, InvalidSpecError, WidthMismatchError

_INDEX_DTYPES = (torch.int32, torch.int64)


class CacheGroup(NamedTuple):
    """A cache group as the checks see it.

    Attributes:
        addressing: Its layout's numbers.
        num_blocks: Blocks of its pool, the null block included.
    """

    addressing: Addressing
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """What a step uses of one cache group.

    Attributes:
        group: The group's number.
        addressing: The group's addressing.
        num_blocks: Blocks of the group's pool, the null block included.
        table: [rows, W] int32, the batch's rows first.
        slots: [tokens] int64, the real tokens first.
        ref_counts: [pool] int32, or None.
        ref_blocks: [N or more, blocks] int32, or None.
    """

    group: int
    addressing: Addressing
    num_blocks: int
    table: torch.Tensor
    slots: torch.Tensor
    ref_counts: torch.Tensor | None
    ref_blocks: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStep:
    """A step as the checks see it.

    Attributes:
        groups: The groups whose tensors have the planned shapes.
        seq_lens: [N] tokens of each request, those of this step included, on all ranks.
        query_start_loc: [N + 1 or more] where each request's tokens begin.
        num_blocks_of_row: [N, G] blocks that each request's row holds.
        checks_untouched: Whether columns that the step does not touch are looked at.
        checks_shared_writes: Whether a written block must have one holder alone.
    """

    groups: tuple[GroupStep, ...]
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_blocks_of_row: torch.Tensor
    checks_untouched: bool
    checks_shared_writes: bool

    @property
    def num_reqs(self) -> int:
        """Requests of the step, padding left out."""
        return self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArguments:
    """What a caller hands to a check, of the right types and numbers but not yet trusted.

    Attributes:
        block_tables: One tensor a group.
        slots: One row of slots a group.
        seq_lens: [N] int32 or int64.
        query_start_loc: [N + 1 or more] int32 or int64.
        num_blocks_of_row: [N, G] int32 or int64.
        ref_counts: One [pool] int32 tensor a group, or None.
        ref_blocks: One [N or more, blocks] int32 tensor a group, or None.
    """

    block_tables: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_blocks_of_row: torch.Tensor
    ref_counts: tuple[torch.Tensor, ...] | None
    ref_blocks: tuple[torch.Tensor, ...] | None

    @property
    def num_reqs(self) -> int:
        """Requests of the step, padding left out."""
        return self.num_blocks_of_row.shape[0]


def read_arguments(
    groups: Sequence[CacheGroup],
    block_tables: Sequence[torch.Tensor],
    slot_mappings: torch.Tensor | Sequence[torch.Tensor],
    *,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_blocks_of_row: torch.Tensor,
    ref_counts: Sequence[torch.Tensor] | None,
    ref_blocks: Sequence[torch.Tensor] | None,
) -> StepArguments:
    """Refuse what is not a description of a step; the arguments are those of a check.

    Raises:
        InvalidSpecError: An argument is not a tensor, or not a sequence of them.
        InvalidEditError: The number of tensors is not that of groups.
        WidthMismatchError: A tensor's shape or dtype is not the one needed.
    """
    tables = _tensors("block_tables", block_tables, len(groups))
    slots = _tensors("slot_mappings", slot_mappings, len(groups))
    for name, tensors, dims in (("block_tables", tables, 2), ("slot_mappings", slots, 1)):
        for group, tensor in enumerate(tensors):
            _require_dims(f"{name}[{group}]", tensor, dims)
    _require_index("num_blocks_of_row", num_blocks_of_row, 2)
    num_reqs, num_groups = num_blocks_of_row.shape
    if num_groups != len(groups):
        raise WidthMismatchError(
            f"num_blocks_of_row must be [requests, {len(groups)} groups], "
            f"got {list(num_blocks_of_row.shape)}",
            shape=tuple(num_blocks_of_row.shape),
            num_groups=len(groups),
        )
    for name, tensor, size in (
        ("seq_lens", seq_lens, num_reqs),
        ("query_start_loc", query_start_loc, num_reqs + 1),
    ):
        _require_index(name, tensor, 1)
        _require_size(name, tensor, size)
    counts = None if ref_counts is None else _tensors("ref_counts", ref_counts, len(groups))
    for group, tensor in enumerate(counts or ()):
        _require_index(f"ref_counts[{group}]", tensor, 1, dtypes=(torch.int32,))
        _require_size(f"ref_counts[{group}]", tensor, groups[group].num_blocks, exact=True)
    blocks = None if ref_blocks is None else _tensors("ref_blocks", ref_blocks, len(groups))
    for group, tensor in enumerate(blocks or ()):
        _require_index(f"ref_blocks[{group}]", tensor, 2, dtypes=(torch.int32,))
        _require_size(f"ref_blocks[{group}]", tensor, num_reqs)
    return StepArguments(
        block_tables=tables,
        slots=slots,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        num_blocks_of_row=num_blocks_of_row,
        ref_counts=counts,
        ref_blocks=blocks,
    )


def _tensors(name: str, values: object, count: int) -> tuple[torch.Tensor, ...]:
    if isinstance(values, torch.Tensor) and values.dim() == 0:
        raise WidthMismatchError(f"{name} must have one row a group, got a scalar", argument=name)
    if not isinstance(values, (torch.Tensor, list, tuple)):
        raise InvalidSpecError(
            f"{name} must hold one tensor a group, not {type(values).__name__}", argument=name
        )
    tensors = tuple(_as_tensor(f"each of {name}", value) for value in values)
    if len(tensors) != count:
        raise InvalidEditError(
            f"{name} must have one tensor for each of {count} groups, got {len(tensors)}",
            argument=name,
            num_groups=count,
            found=len(tensors),
        )
    return tensors


def _as_tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InvalidSpecError(
            f"{name} must be a tensor, not {type(value).__name__}", argument=name
        )
    return value


def _require_dims(name: str, value: torch.Tensor, dims: int) -> None:
    if value.dim() != dims:
        raise WidthMismatchError(
            f"{name} must have {dims} dimensions, got shape {list(value.shape)}",
            argument=name,
            shape=tuple(value.shape),
        )


def _require_index(
    name: str, value: object, dims: int, *, dtypes: tuple[torch.dtype, ...] = _INDEX_DTYPES
) -> None:
    tensor = _as_tensor(name, value)
    _require_dims(name, tensor, dims)
    if tensor.dtype not in dtypes:
        raise WidthMismatchError(
            f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}",
            argument=name,
            dtype=tensor.dtype,
        )


def _require_size(name: str, value: torch.Tensor, size: int, *, exact: bool = False) -> None:
    found = value.shape[0]
    if found < size or (exact and found > size):
        raise WidthMismatchError(
            f"{name} must have {'' if exact else 'at least '}{size} entries, got {found}",
            argument=name,
            found=found,
            expected=size,
        )
