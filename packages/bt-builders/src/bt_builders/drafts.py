"""Steps drafts on the device: one token a request, moved on where the batch lies.

Lengths and slots live in buffers of their own; the tables' tensors are only read. Nothing
here reads the device, so that a graph may capture any number of steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from bt_width import BlockTableLayout, InvalidEditError

from ._checks import require_tensor
from ._support import LeadingParts, operations_for
from .guard import BatchGuard
from .operations import DraftRows

Metadata = TypeVar("Metadata")


class SlotBuilder(ABC, Generic[Metadata]):
    """Builds the metadata of a group with slots, and steps its drafts without a batch.

    A draft step has one token a request. Its metadata stands in buffers that are
    allocated once, so that a CUDA graph may hold any number of steps.

    Belongs to one thread at a time; those of other groups and micro-batches run beside it.

    Attributes:
        layout: The group's plan.
    """

    layout: BlockTableLayout

    def __init__(
        self, layout: BlockTableLayout, device: torch.device | str, tokens_per_state: int = 1
    ) -> None:
        """Allocate the draft steps of the most requests that ``layout`` allows.

        Raises:
            InvalidSpecError: ``layout`` is not a layout, or ``device`` cannot be used.
        """
        self.layout = layout
        self._guard = BatchGuard(layout, device)
        self._device = self._guard.device
        self._addressing = layout.addressing
        self._tokens_per_state = tokens_per_state
        self._operations = operations_for(self._device)
        num_reqs = layout.limits.max_num_reqs
        self._drafts = LeadingParts(
            DraftRows(
                seq_lens=torch.zeros(num_reqs, dtype=torch.int32, device=self._device),
                local_lens=torch.zeros(num_reqs, dtype=torch.int32, device=self._device),
                positions=torch.zeros(num_reqs, dtype=torch.int64, device=self._device),
                slot_mapping=torch.zeros(num_reqs, dtype=torch.int64, device=self._device),
            )
        )

    def start_drafts(self, block_table: torch.Tensor, seq_lens: torch.Tensor) -> Metadata:
        """Return the metadata of each request's last token; valid until the next start.

        Its ``positions`` are those of these tokens, counted over all ranks: what a draft
        model is given.

        Args:
            block_table: [N, W] int32; the group's table of this batch.
            seq_lens: [N] int32; the tokens that stay, 0 for a padding row.

        Raises:
            WidthMismatchError: A tensor is not as planned.
            InvalidEditError: There are more requests than planned.
        """
        rows = self._draft_rows(block_table)
        self._check_ints("seq_lens", seq_lens, (rows.seq_lens.numel(),))
        rows.seq_lens.copy_(seq_lens)
        return self._step(block_table, rows, 0)

    def advance_drafts(self, block_table: torch.Tensor) -> Metadata:
        """Move the draft steps on by one token, in place; a graph may capture it.

        Past ``max_model_len + lookahead_tokens`` a length stays, and its token has no slot.

        Args:
            block_table: [N, W] int32; the group's table of this batch.

        Raises:
            WidthMismatchError: It is not as planned.
            InvalidEditError: There are more requests than planned.
        """
        return self._step(block_table, self._draft_rows(block_table), 1)

    def rebind(self) -> None:
        """Write the builder's constants and buffers anew, in place, after memory was lost."""
        self._drafts.fill(0)

    @abstractmethod
    def _describe_drafts(self, block_table: torch.Tensor, rows: DraftRows) -> Metadata:
        """Return the metadata of one token a request, whose lengths and slots are ``rows``."""

    def _step(self, block_table: torch.Tensor, rows: DraftRows, step: int) -> Metadata:
        self._operations.step_drafts(
            self._addressing, self._tokens_per_state, block_table, rows, step
        )
        return self._describe_drafts(block_table, rows)

    def _draft_rows(self, block_table: torch.Tensor) -> DraftRows:
        """Return the buffers' rows of a table that is as planned."""
        has_rows = isinstance(block_table, torch.Tensor) and block_table.dim()
        num_reqs = block_table.shape[0] if has_rows else 0
        self._check_ints("block_table", block_table, (num_reqs, self._addressing.width))
        limit = self.layout.limits.max_num_reqs
        if num_reqs > limit:
            raise InvalidEditError(
                f"{num_reqs} requests are more than the {limit} planned for",
                num_reqs=num_reqs,
                limit=limit,
            )
        return self._drafts.first(num_reqs)

    def _check_ints(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        require_tensor(
            name,
            tensor,
            shape=shape,
            dtype=torch.int32,
            device=self._device,
            derivation=self.layout.explain,
        )
