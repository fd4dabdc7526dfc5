"""What the builders of groups with slots share: their guard, their geometry, their draft steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from bt_width import BlockTableLayout

from .batch.geometry import RowGeometry
from .batch.guard import BatchGuard
from .devices import operations_for
from .drafts import DraftSteps
from .operations import DraftRows

Metadata = TypeVar("Metadata")


class SlotBuilder(ABC, Generic[Metadata]):
    """Holds a group's plan on its device, and steps drafts without a batch of their own.

    A draft step has one token a request. Its metadata stands in buffers that are
    allocated once, so that a CUDA graph may hold any number of steps.

    Attributes:
        layout: The group's plan.
    """

    layout: BlockTableLayout

    def __init__(
        self, layout: BlockTableLayout, device: torch.device | str, tokens_per_state: int = 1
    ) -> None:
        """Allocate the draft steps of the most requests that ``layout`` allows.

        Raises:
            InvalidSpecError: ``layout`` is none, or ``device`` cannot be used.
        """
        self.layout = layout
        self._guard = BatchGuard(layout, device)
        self._device = self._guard.device
        self._geometry = RowGeometry.of(layout, tokens_per_state)
        self._operations = operations_for(self._device)
        self._drafts = DraftSteps(layout, self._geometry, self._device, self._operations)

    def start_drafts(self, block_table: torch.Tensor, seq_lens: torch.Tensor) -> Metadata:
        """Return the metadata of each request's last token; valid until the next start.

        Args:
            block_table: [N, W] int32; the group's table of this batch.
            seq_lens: [N] int32; the tokens that stay, 0 for a padding row.

        Raises:
            WidthMismatchError: A tensor is not as planned.
            InvalidEditError: There are more requests than planned.
        """
        return self._describe_drafts(block_table, self._drafts.start(block_table, seq_lens))

    def advance_drafts(self, block_table: torch.Tensor) -> Metadata:
        """Move the draft steps on by one token, in place; a graph may capture it.

        Past ``max_model_len`` a length stays and its token has no slot.

        Args:
            block_table: [N, W] int32; the group's table of this batch.

        Raises:
            WidthMismatchError: It is not as planned.
            InvalidEditError: There are more requests than planned.
        """
        return self._describe_drafts(block_table, self._drafts.advance(block_table))

    @abstractmethod
    def _describe_drafts(self, block_table: torch.Tensor, rows: DraftRows) -> Metadata:
        """Return the metadata of one token a request, whose lengths and slots are ``rows``."""
