"""Draft steps: one token a request, moved on where the batch lies, on the device.

Lengths and slots live in buffers of their own; the tables' tensors are only read.
Nothing here reads the device, so that a graph may capture any number of steps.
"""

from __future__ import annotations

import torch

from bt_width import BlockTableLayout, InvalidEditError

from .batch.checks import require_tensor
from .batch.geometry import RowGeometry
from .operations import DraftRows, Operations


class DraftSteps:
    """The lengths and slots of a group's draft steps."""

    def __init__(
        self,
        layout: BlockTableLayout,
        geometry: RowGeometry,
        device: torch.device,
        operations: Operations,
    ) -> None:
        """Allocate one entry for each request the limits allow."""
        self._layout = layout
        self._geometry = geometry
        self._device = device
        self._operations = operations
        num_reqs = layout.limits.max_num_reqs
        self._rows = DraftRows(
            seq_lens=torch.zeros(num_reqs, dtype=torch.int32, device=device),
            local_lens=torch.zeros(num_reqs, dtype=torch.int32, device=device),
            positions=torch.zeros(num_reqs, dtype=torch.int64, device=device),
            slot_mapping=torch.zeros(num_reqs, dtype=torch.int64, device=device),
        )

    def start(self, block_table: torch.Tensor, seq_lens: torch.Tensor) -> DraftRows:
        """Stand on the last of the ``seq_lens`` [N] tokens of each row of ``block_table`` [N, W].

        Returns:
            Leading slices of the own buffers; they hold what the tables say of those tokens.

        Raises:
            WidthMismatchError: A tensor is not as planned.
            InvalidEditError: There are more requests than planned.
        """
        rows = self._leading(block_table)
        self._check("seq_lens", seq_lens, (rows.seq_lens.numel(),))
        rows.seq_lens.copy_(seq_lens)
        self._operations.step_drafts(self._geometry, block_table, rows, 0)
        return rows

    def advance(self, block_table: torch.Tensor) -> DraftRows:
        """Move every row of ``block_table`` [N, W] on by one token, in place.

        Raises:
            WidthMismatchError: It is not as planned.
            InvalidEditError: There are more requests than planned.
        """
        rows = self._leading(block_table)
        self._operations.step_drafts(self._geometry, block_table, rows, 1)
        return rows

    def _leading(self, block_table: torch.Tensor) -> DraftRows:
        """Return the entries of the rows of a table that is as planned."""
        has_rows = isinstance(block_table, torch.Tensor) and block_table.dim()
        num_reqs = block_table.shape[0] if has_rows else 0
        self._check("block_table", block_table, (num_reqs, self._geometry.width))
        limit = self._rows.seq_lens.numel()
        if num_reqs > limit:
            raise InvalidEditError(
                f"{num_reqs} requests are more than the {limit} planned for",
                num_reqs=num_reqs,
                limit=limit,
            )
        return DraftRows(*(buffer[:num_reqs] for buffer in self._rows))

    def _check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        require_tensor(
            name,
            tensor,
            shape=shape,
            dtype=torch.int32,
            device=self._device,
            derivation=self._layout.explain,
        )
