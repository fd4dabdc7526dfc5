"""Checks of shapes, strides, types and addresses: on the host, without reading a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .findings import FaultKind, Finding
from .step import CacheGroup, CheckedStep, GroupStep, StepArguments


class ShapeChecks:
    """What the tensors of every step must look like; it remembers where they were."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        max_rows: int,
        max_tokens: int,
        *,
        fixed_addresses: bool,
        checks_untouched: bool = True,
        checks_shared_writes: bool = True,
    ) -> None:
        """Expect tables of at most ``max_rows`` rows and slots of at most ``max_tokens`` tokens."""
        self._groups = tuple(groups)
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._fixed_addresses = fixed_addresses
        self._checks_untouched = checks_untouched
        self._checks_shared_writes = checks_shared_writes
        self._seen: dict[tuple[str, int], tuple[int, int]] = {}

    def forget(self) -> None:
        """Let every tensor have moved before the next step."""
        self._seen.clear()

    def check(self, arguments: StepArguments) -> tuple[CheckedStep, list[Finding]]:
        """Return the groups that can be read, on the first table's device, and what is wrong."""
        tables = arguments.block_tables
        device = tables[0].device if tables else arguments.seq_lens.device
        num_reqs = arguments.num_reqs
        findings: list[Finding] = []
        groups = []
        for group, cache in enumerate(self._groups):
            table, slots = tables[group], arguments.slots[group]
            faults = [
                *self._table_faults(group, table, num_reqs, device),
                *self._slot_faults(group, slots, device),
            ]
            findings += faults
            if any(fault.kind is not FaultKind.ADDRESS for fault in faults):
                continue
            counts, blocks = arguments.ref_counts, arguments.ref_blocks
            groups.append(
                GroupStep(
                    group=group,
                    addressing=cache.addressing,
                    num_blocks=cache.num_blocks,
                    table=table,
                    slots=slots,
                    ref_counts=None if counts is None else counts[group].to(device),
                    ref_blocks=None if blocks is None else blocks[group].to(device).contiguous(),
                )
            )
        step = CheckedStep(
            groups=tuple(groups),
            seq_lens=arguments.seq_lens[:num_reqs].to(device),
            query_start_loc=arguments.query_start_loc.to(device),
            num_blocks_of_row=arguments.num_blocks_of_row.to(device),
            checks_untouched=self._checks_untouched,
            checks_shared_writes=self._checks_shared_writes,
        )
        return step, findings

    def _table_faults(
        self, group: int, table: torch.Tensor, num_reqs: int, device: torch.device
    ) -> Iterator[Finding]:
        rows, width = table.shape
        planned = self._groups[group].addressing.width
        yield from _type_faults(group, table, torch.int32, device)
        if not num_reqs <= rows <= self._max_rows:
            yield _finding(FaultKind.ROWS, group, rows, f"{num_reqs} to {self._max_rows}")
        if width != planned:
            yield _finding(FaultKind.WIDTH, group, width, planned)
        elif (width > 1 and table.stride(1) != 1) or (rows > 1 and table.stride(0) < planned):
            strides = f"table strides {list(table.stride())}"
            yield _finding(FaultKind.STRIDE, group, strides, f"[{planned} or more, 1]")
        else:
            yield from self._address_faults("table", group, table)

    def _slot_faults(
        self, group: int, slots: torch.Tensor, device: torch.device
    ) -> Iterator[Finding]:
        yield from _type_faults(group, slots, torch.int64, device)
        if slots.shape[0] > self._max_tokens:
            yield _finding(
                FaultKind.SLOT_COUNT, group, slots.shape[0], f"at most {self._max_tokens}"
            )
        if slots.shape[0] > 1 and slots.stride(0) != 1:
            yield _finding(FaultKind.STRIDE, group, f"slot stride {slots.stride(0)}", 1)
        else:
            yield from self._address_faults("slots", group, slots)

    def _address_faults(self, name: str, group: int, tensor: torch.Tensor) -> Iterator[Finding]:
        # an empty view has no address, and one row's stride means nothing
        if not self._fixed_addresses or tensor.numel() == 0:
            return
        row_stride = tensor.stride(0) if tensor.shape[0] > 1 else 0
        address, stride = self._seen.setdefault((name, group), (tensor.data_ptr(), row_stride))
        if tensor.data_ptr() != address:
            found, expected = hex(tensor.data_ptr()), hex(address)
            yield _finding(FaultKind.ADDRESS, group, f"{name} at {found}", expected)
        if row_stride and not stride:
            self._seen[name, group] = (address, row_stride)
        elif row_stride and row_stride != stride:
            yield _finding(FaultKind.STRIDE, group, f"{name} row stride {row_stride}", stride)


def _type_faults(
    group: int, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> Iterator[Finding]:
    if tensor.dtype != dtype:
        yield _finding(FaultKind.DTYPE, group, str(tensor.dtype), str(dtype))
    if tensor.device != device:
        yield _finding(FaultKind.DEVICE, group, str(tensor.device), str(device))


def _finding(kind: FaultKind, group: int, value: int | str, expected: int | str) -> Finding:
    return Finding(kind=kind, group=group, value=value, expected=expected)
