"""What tables must hold, from the pure contract alone: lists of block ids, and a layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bt_width import NULL_BLOCK, PAD_SLOT, BlockTableLayout


class TableModel:
    """Rows as lists of block ids, one a group."""

    def __init__(self, layouts: Sequence[BlockTableLayout]) -> None:
        """Start with empty rows."""
        self.layouts = tuple(layouts)
        self.limits = self.layouts[0].limits
        self._ids: list[list[list[int]]] = []
        self._nulled: list[list[int]] = []
        for _ in range(self.limits.max_num_reqs):
            self._ids.append([[] for _ in self.layouts])
            self._nulled.append([0] * len(self.layouts))

    def num_blocks(self, row: int, group: int) -> int:
        """Blocks that a row holds."""
        return len(self._ids[row][group])

    def room(self, row: int, group: int) -> int:
        """Blocks that a row still has room for."""
        return self.layouts[group].blocks_per_row - self.num_blocks(row, group)

    def append(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Add blocks behind a row's."""
        for held, new in zip(self._ids[row], block_ids, strict=True):
            held.extend(new)

    def replace(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Let a row hold these blocks and no others."""
        self._ids[row] = [list(ids) for ids in block_ids]
        self._nulled[row] = [0] * len(self.layouts)

    def clear(self, row: int) -> None:
        """Empty a row."""
        self.replace(row, [()] * len(self.layouts))

    def null_prefix(self, row: int, group: int, num_blocks: int) -> None:
        """Null a row's first blocks."""
        self._nulled[row][group] = max(self._nulled[row][group], num_blocks)

    def swap(self, first: int, second: int) -> None:
        """Exchange two rows."""
        ids, nulled = self._ids, self._nulled
        ids[first], ids[second] = ids[second], ids[first]
        nulled[first], nulled[second] = nulled[second], nulled[first]

    def move(self, source: int, target: int) -> None:
        """Put a row in another's place."""
        if source != target:
            self.swap(source, target)
            self.clear(source)

    def kernel_ids(self, row: int, group: int) -> list[int]:
        """The kernel-block ids of a row, without its tail."""
        nulled = self._nulled[row][group]
        ids = [NULL_BLOCK] * nulled + self._ids[row][group][nulled:]
        return self.layouts[group].expand(ids)

    def table(self, rows: Sequence[int], group: int) -> torch.Tensor:
        """The batch's whole table, [max_num_reqs, W]; rows past the batch are null."""
        table = np.full((self.limits.max_num_reqs, self.layouts[group].width), NULL_BLOCK, np.int32)
        for request, row in enumerate(rows):
            if row >= 0:
                ids = self.kernel_ids(row, group)
                table[request, : len(ids)] = ids
        return torch.from_numpy(table)

    def slots(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        positions: Sequence[int],
        group: int,
        num_tokens_padded: int,
    ) -> list[int]:
        """The group's whole slot buffer; slots past the real tokens are padding."""
        slots = [PAD_SLOT] * self.limits.max_num_batched_tokens
        for request, row in enumerate(rows):
            for token in range(starts[request], min(starts[request + 1], num_tokens_padded)):
                if row >= 0:
                    ids = self.kernel_ids(row, group)
                    slots[token] = self.layouts[group].slot(positions[token], ids)
        return slots
