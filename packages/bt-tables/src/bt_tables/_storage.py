"""The device memory of a set of groups: one allocation a kind, and views into it.

One flat tensor for all rows, one for all batch rows, one for all slots: a kernel takes
one pointer a kind and finds a group by an offset, so no address is stored on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bt_width import NULL_BLOCK, PAD_SLOT, BlockTableLayout, InvalidSpecError

from ._packet import GROUP_FIELDS, RecordForm, TableGroup
from .devices import Executor

_ALIGNMENT_BYTES = 256


class Storage:
    """The tables, slots and group records of a set of groups on one device.

    Attributes:
        layouts: One plan a group, all of the same limits.
        num_rows: Rows of every table (R), also the batch rows.
        num_slots: Slots of every group, the most tokens of a step.
        groups: What a launch knows of each group.
        device_groups: The groups on the device, [G, ints of a group] int64.
        rows: All groups' rows, flat int32.
        batch: All groups' batch rows, flat int32.
        slots: All groups' slots, flat int64.
    """

    def __init__(self, layouts: Sequence[BlockTableLayout], executor: Executor) -> None:
        """Allocate and fill everything.

        Raises:
            InvalidSpecError: Memory is too small.
        """
        self.layouts = tuple(layouts)
        limits = self.layouts[0].limits
        self.num_rows, self.num_slots = limits.max_num_reqs, limits.max_num_batched_tokens
        tables_at, table_size = _places([self.num_rows * layout.width for layout in layouts], 4)
        slots_at, slots_size = _places([self.num_slots] * len(layouts), 8)
        # both kinds of rows, the slots, and what the host keeps of every row
        record_bytes = 4 * RecordForm(len(layouts)).size
        needed = 2 * 4 * table_size + 8 * slots_size + 4 * record_bytes * self.num_rows
        self._refuse_too_large(needed, executor.memory_bytes(), executor.device)
        try:
            self.rows = executor.full(table_size, torch.int32, NULL_BLOCK)
            self.batch = executor.full(table_size, torch.int32, NULL_BLOCK)
            self.slots = executor.full(slots_size, torch.int64, PAD_SLOT)
        except (RuntimeError, MemoryError) as error:
            raise self._too_large(needed, executor.device) from error
        self.groups = tuple(
            TableGroup(layout.addressing, tables_at[group], slots_at[group])
            for group, layout in enumerate(self.layouts)
        )
        num_ints = len(self.groups) * len(GROUP_FIELDS)
        self.device_groups = executor.empty(num_ints, torch.int64).view(len(self.groups), -1)
        self.write_groups()

        self._slots = self.slots.view(len(self.groups), -1)
        self._batch_tables = tuple(self.table(self.batch, group) for group in range(len(layouts)))
        self._leading_tables: dict[int, tuple[torch.Tensor, ...]] = {}
        self._leading_slots: dict[int, torch.Tensor] = {}

    def write_groups(self) -> None:
        """Write the groups to where they lie on the device."""
        self.device_groups.copy_(torch.tensor([group.ints() for group in self.groups]))

    def null_outside(self, group: int, starts: torch.Tensor, ends: torch.Tensor) -> None:
        """Null each row's columns below its start and from its end on, [R] each."""
        width = self.groups[group].addressing.width
        column = torch.arange(width, device=self.rows.device)
        is_outside = (column < starts[:, None]) | (column >= ends[:, None])
        self.table(self.rows, group).masked_fill_(is_outside, NULL_BLOCK)

    def table(self, flat: torch.Tensor, group: int) -> torch.Tensor:
        """Return a group's [R, W] table in ``rows`` or ``batch``."""
        width = self.groups[group].addressing.width
        start = self.groups[group].table_at
        return flat[start : start + self.num_rows * width].view(self.num_rows, width)

    def block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Return the leading ``num_reqs`` batch rows of every group; the same views each time."""
        found = self._leading_tables.get(num_reqs)
        if found is None:
            found = tuple(table[:num_reqs] for table in self._batch_tables)
            self._leading_tables[num_reqs] = found
        return found

    def slot_mappings(self, num_tokens: int) -> torch.Tensor:
        """Return the leading ``num_tokens`` slots of every group, [G, num_tokens]."""
        found = self._leading_slots.get(num_tokens)
        if found is None:
            found = self._leading_slots[num_tokens] = self._slots[:, :num_tokens]
        return found

    def _refuse_too_large(self, needed: int, available: int, device: torch.device) -> None:
        if needed > available:
            raise self._too_large(needed, device, f", and {available:,} bytes are available")

    def _too_large(self, needed: int, device: torch.device, also: str = "") -> InvalidSpecError:
        limits = self.layouts[0].limits
        return InvalidSpecError(
            f"the tables of {len(self.layouts)} groups need {needed:,} bytes on {device}{also}; "
            f"they hold max_num_reqs {limits.max_num_reqs} rows of up to "
            f"{max(layout.width for layout in self.layouts)} columns twice, and "
            f"max_num_batched_tokens {limits.max_num_batched_tokens} slots a group: lower one of "
            "them, or max_model_len",
            num_bytes=needed,
            max_num_reqs=limits.max_num_reqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
        )


def _places(sizes: Sequence[int], element_bytes: int) -> tuple[list[int], int]:
    """Return where each part of an allocation starts, aligned, and the allocation's size."""
    unit = _ALIGNMENT_BYTES // element_bytes
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // unit) * unit
    return places, end
