"""The contexts of prefilling requests, packed into a workspace piece by piece."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bt_width import BlockTableLayout, InvalidSpecError

from ..batch.geometry import RowGeometry, localise
from ..batch.transfer import to_device
from .metadata import MLAContextChunk


class Span(NamedTuple):
    """A stretch of one request's context.

    Attributes:
        req: The request.
        start: Its first token.
        length: Its tokens.
    """

    req: int
    start: int
    length: int


def pack_contexts(
    context_lens: list[int], workspace_tokens: int, *, unit: int, turn: int
) -> list[list[Span]]:
    """Return the spans that each workspace is filled with, in the order of the requests.

    Args:
        context_lens: Tokens of each request's context.
        workspace_tokens: Room of a workspace.
        unit: Where a context is cut: at a multiple of so many of its tokens.
        turn: Room is taken in multiples of so many tokens, the same for every rank.
    """
    chunks: list[list[Span]] = []
    room = 0
    for req, length in enumerate(context_lens):
        start = 0
        while start < length:
            take = length - start
            if -(-take // turn) * turn > room:
                take = room // unit * unit
            if take == 0:
                chunks.append([])
                room = workspace_tokens
                continue
            chunks[-1].append(Span(req, start, take))
            start, room = start + take, room - -(-take // turn) * turn
    return chunks


class ContextPart:
    """Plans spans on the host from upper bounds and describes them on the device."""

    def __init__(
        self,
        layout: BlockTableLayout,
        geometry: RowGeometry,
        device: torch.device,
        workspace_tokens: int,
    ) -> None:
        """Check that the workspace holds the smallest span that may be cut.

        Raises:
            InvalidSpecError: It does not.
        """
        self._geometry = geometry
        self._device = device
        # the first token of a span is the first of a kernel block on every rank
        per_rank = math.lcm(layout.kernel_block_size, geometry.interleave)
        self._unit = geometry.shards * per_rank
        self._workspace_tokens = workspace_tokens
        if workspace_tokens < self._unit:
            raise InvalidSpecError(
                f"workspace_tokens {workspace_tokens} must hold at least {self._unit} tokens: "
                f"{geometry.shards} ranks, kernel blocks of {layout.kernel_block_size}, "
                f"interleave {geometry.interleave}",
                workspace_tokens=workspace_tokens,
                unit=self._unit,
            )

    def build(
        self, context_bounds: list[int], context_lens: torch.Tensor
    ) -> tuple[MLAContextChunk, ...]:
        """Return the pieces of all contexts.

        Args:
            context_bounds: Upper bounds of ``context_lens``, on the host.
            context_lens: [P] int32, on the device.
        """
        chunks = pack_contexts(
            context_bounds,
            self._workspace_tokens,
            unit=self._unit,
            turn=self._geometry.tokens_per_turn,
        )
        return tuple(self._describe(spans, context_lens) for spans in chunks)

    def _describe(self, spans: list[Span], context_lens: torch.Tensor) -> MLAContextChunk:
        num_reqs = context_lens.numel()
        plan = np.zeros((2, num_reqs), dtype=np.int32)
        for span in spans:
            plan[:, span.req] = span.start, span.length
        local_ends = self._local_rows(plan[1]).cumsum(dtype=np.int32)
        planned = to_device(np.concatenate([plan, local_ends[None]]), self._device)
        starts, bounds, local_cu = planned[0], planned[1], _after_zero(planned[2])
        # a context may be shorter than its bound; what it lacks, its span lacks
        lens = torch.minimum((context_lens - starts).clamp_(min=0), bounds)
        cu_seq_lens = _after_zero(torch.cumsum(lens, 0, dtype=torch.int32))
        num_tokens = int(plan[1].sum())
        places = torch.arange(num_tokens, dtype=torch.int32, device=self._device)
        token_to_req = torch.searchsorted(cu_seq_lens[1:], places, right=True, out_int32=True)
        num_local_rows = int(local_ends[-1])
        return MLAContextChunk(
            num_tokens=num_tokens,
            max_seq_len=int(plan[1].max()),
            starts=starts,
            cu_seq_lens=cu_seq_lens,
            token_to_req=token_to_req,
            local_starts=starts // self._geometry.shards,
            local_seq_lens=localise(lens, self._geometry),
            local_cu_seq_lens=local_cu,
            num_local_rows=num_local_rows,
            gathered_rows=self._gathered_rows(
                places, token_to_req, cu_seq_lens, local_cu, num_local_rows
            ),
        )

    def _local_rows(self, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the rows that a span may take on the rank that keeps most of it."""
        turn, interleave = self._geometry.tokens_per_turn, self._geometry.interleave
        return -(-lengths // turn) * interleave if self._geometry.shards > 1 else lengths

    def _gathered_rows(
        self,
        places: torch.Tensor,
        token_to_req: torch.Tensor,
        cu_seq_lens: torch.Tensor,
        local_cu: torch.Tensor,
        num_local_rows: int,
    ) -> torch.Tensor:
        """Return each token's row among those of all ranks; 0 for a token past the last request.

        Such a token's request is P, where ``cu_seq_lens`` and ``local_cu`` have their last entry.
        """
        offsets = (places - cu_seq_lens[token_to_req]).long()
        turn, interleave = self._geometry.tokens_per_turn, self._geometry.interleave
        rank = offsets % turn // interleave
        local = offsets // turn * interleave + offsets % interleave
        rows = rank * num_local_rows + local_cu[token_to_req] + local
        return rows.masked_fill(token_to_req == cu_seq_lens.numel() - 1, 0)


def _after_zero(ends: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(ends, (1, 0))
