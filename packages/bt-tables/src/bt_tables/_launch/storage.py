"""The device memory of a set of groups: one allocation a kind, and views into it.

One flat tensor for all rows, one for all batch rows, one for all slots: a kernel takes
one pointer a kind and finds a group by an offset, so no address is stored on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bt_width import NULL_BLOCK, PAD_SLOT, BlockTableLayout, InvalidSpecError, ServingLimits

from .executor import Executor
from .wire import GROUP_FACTS, GroupFacts

_ALIGNMENT_BYTES = 256
_UNLIMITED = 2**31 - 1
_NO_GROUPS = ServingLimits(
    max_model_len=1, max_num_reqs=_UNLIMITED, max_num_batched_tokens=_UNLIMITED
)


class Storage:
    """The tables, slots and facts of all groups on one device.

    Attributes:
        layouts: One plan a group, all of the same limits.
        limits: Their limits; boundless where there is no group.
        num_rows: Rows of every table (R), also the batch rows.
        num_slots: Slots of every group, the most tokens of a step.
        facts: What a launch knows of each group.
        groups: The facts on the device, [G, GROUP_FACTS] int64.
        rows: All groups' rows, flat int32.
        batch: All groups' batch rows, flat int32; ``rows`` itself where rows lie in
            batch order.
        slots: All groups' slots, flat int64.
    """

    def __init__(
        self, layouts: Sequence[BlockTableLayout], executor: Executor, *, rows_are_batch: bool
    ) -> None:
        """Allocate and fill everything.

        Raises:
            InvalidSpecError: The layouts are of different limits, or a block's tokens
                over all ranks leave int32.
        """
        self.layouts = _checked(layouts)
        self.limits = _common_limits(self.layouts)
        self.num_rows = self.limits.max_num_reqs if self.layouts else 0
        table_bases, table_size = _bases(
            [self.num_rows * layout.width for layout in self.layouts], 4
        )
        self.num_slots = self.limits.max_num_batched_tokens if self.layouts else 0
        slot_bases, slots_size = _bases([self.num_slots] * len(self.layouts), 8)

        self.rows = executor.empty(table_size, torch.int32).fill_(NULL_BLOCK)
        self.batch = self.rows
        if not rows_are_batch:
            self.batch = executor.empty(table_size, torch.int32).fill_(NULL_BLOCK)
        self.slots = executor.empty(slots_size, torch.int64).fill_(PAD_SLOT)
        self.facts = tuple(
            _facts(layout, table_at, slots_at)
            for layout, table_at, slots_at in zip(
                self.layouts, table_bases, slot_bases, strict=True
            )
        )
        num_facts = len(self.facts) * GROUP_FACTS
        self.groups = executor.empty(num_facts, torch.int64).view(-1, GROUP_FACTS)
        self.fill_groups()

        stride = slots_size // max(len(self.layouts), 1)
        self._slots = self.slots.view(len(self.layouts), stride)
        self._batch_tables = tuple(
            self.table(self.batch, group) for group in range(len(self.facts))
        )
        self._leading_tables: dict[int, tuple[torch.Tensor, ...]] = {}
        self._leading_slots: dict[int, torch.Tensor] = {}

    def fill_groups(self) -> None:
        """Write the facts to where they lie on the device."""
        if self.facts:
            padding = (0,) * (GROUP_FACTS - len(GroupFacts._fields))
            self.groups.copy_(torch.tensor([facts + padding for facts in self.facts]))

    def null_outside(self, group: int, starts: torch.Tensor, ends: torch.Tensor) -> None:
        """Null each row's columns below its start and from its end on, [R] each."""
        column = torch.arange(self.facts[group].width, device=self.rows.device)
        is_outside = (column < starts[:, None]) | (column >= ends[:, None])
        self.table(self.rows, group).masked_fill_(is_outside, NULL_BLOCK)

    def table(self, flat: torch.Tensor, group: int) -> torch.Tensor:
        """Return a group's [R, W] table in ``rows`` or ``batch``."""
        width = self.facts[group].width
        start = self.facts[group].table_at
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
            if not self.facts:
                return self.slots.new_empty((0, num_tokens))
            found = self._slots[:, :num_tokens]
            self._leading_slots[num_tokens] = found
        return found


def _checked(layouts: Sequence[BlockTableLayout]) -> tuple[BlockTableLayout, ...]:
    if not isinstance(layouts, Sequence):
        raise InvalidSpecError(
            f"layouts must be a sequence of plans, not {layouts!r}", value=layouts
        )
    for group, layout in enumerate(layouts):
        if not isinstance(layout, BlockTableLayout):
            raise InvalidSpecError(
                f"the plan of group {group} must be a BlockTableLayout, not {layout!r}", group=group
            )
    return tuple(layouts)


def _common_limits(layouts: Sequence[BlockTableLayout]) -> ServingLimits:
    if not layouts:
        return _NO_GROUPS
    limits = layouts[0].limits
    for group, layout in enumerate(layouts):
        if layout.limits != limits:
            raise InvalidSpecError(
                f"group {group} is planned for {layout.limits}, group 0 for {limits}; "
                "plan all groups of a table for the same limits",
                group=group,
            )
        if layout.tokens_per_block >= 2**31:
            raise InvalidSpecError(
                f"a block of group {group} holds {layout.tokens_per_block} tokens over all "
                "ranks; that must stay below 2^31",
                group=group,
                tokens_per_block=layout.tokens_per_block,
            )
    return limits


def _bases(sizes: Sequence[int], element_bytes: int) -> tuple[list[int], int]:
    """Return where each part of an allocation starts, aligned, and the allocation's size."""
    unit = _ALIGNMENT_BYTES // element_bytes
    bases, end = [], 0
    for size in sizes:
        bases.append(end)
        end += -(-size // unit) * unit
    return bases, end


def _facts(layout: BlockTableLayout, table_at: int, slots_at: int) -> GroupFacts:
    shared = layout.shards > 1
    context = layout.limits.context_parallel
    slot_blocks = {"none": 0, "ring": 1, "block": layout.blocks_per_row}
    return GroupFacts(
        table_at=table_at,
        slots_at=slots_at,
        width=layout.width,
        split=layout.kernel_blocks_per_block,
        block_size=layout.block_size,
        kernel_block_size=layout.kernel_block_size,
        shards=layout.shards,
        rank=context.rank if shared else 0,
        interleave=context.interleave if shared else 1,
        advances=int(layout.slot_mode == "block"),
        slot_blocks=slot_blocks[layout.slot_mode],
    )
