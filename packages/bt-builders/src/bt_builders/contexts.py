"""Packs the contexts of prefilling requests into a workspace, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from bt_tables.reference.addressing import local_lengths as addressed_lengths
from bt_tables.reference.addressing import spread
from bt_width import BlockTableLayout, InvalidSpecError

from ._checks import as_tuple, require_positive
from ._support import to_device
from .common import localise


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAContextChunk:
    """Part of the prefilling requests' (P) contexts, gathered into a workspace at once.

    A request's span begins at a whole kernel block on every rank. Requests without a
    span in this chunk have an empty one.

    Under context parallelism every rank gathers its own rows, ``num_local_rows`` of
    them with gaps, and ``gathered_rows`` finds a token in the ranks' rows one after the
    other. Without it local and global numbers are the same.

    Attributes:
        num_tokens: Tokens of all spans (K), at most.
        max_seq_len: The longest span.
        starts: [P] int32; where each span begins in its request.
        cu_seq_lens: [P + 1] int32; where each span begins among the chunk's tokens.
        token_to_req: [K] int32; each token's request; P past the last one.
        local_starts: [P] int32; where each span begins among this rank's tokens.
        local_seq_lens: [P] int32; tokens of each span on this rank.
        local_cu_seq_lens: [P + 1] int32; where each span begins among the local rows,
            equal on all ranks.
        num_local_rows: Rows that each rank gathers, equal on all ranks.
        gathered_rows: [K] int64; each token's row in [shards * num_local_rows]; 0 past the
            last one.
    """

    num_tokens: int
    max_seq_len: int
    starts: torch.Tensor
    cu_seq_lens: torch.Tensor
    token_to_req: torch.Tensor
    local_starts: torch.Tensor
    local_seq_lens: torch.Tensor
    local_cu_seq_lens: torch.Tensor
    num_local_rows: int
    gathered_rows: torch.Tensor


class ContextSpan(NamedTuple):
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
    context_lens: Sequence[int], workspace_tokens: int, *, unit: int, turn: int
) -> list[list[ContextSpan]]:
    """Return the spans that each workspace is filled with, in the order of the requests.

    Args:
        context_lens: Tokens of each request's context.
        workspace_tokens: Room of a workspace.
        unit: Where a context is cut: at a multiple of so many of its tokens.
        turn: Room is taken in multiples of so many tokens, the same for every rank: one
            round of a context over all of them.

    Raises:
        InvalidSpecError: An argument has the wrong type or is out of range, or a context that
            does not fit cannot be cut either.
    """
    context_lens = as_tuple("context_lens", context_lens, int)
    for name, value in (("workspace_tokens", workspace_tokens), ("unit", unit), ("turn", turn)):
        require_positive(name, value)
    longest = max(context_lens, default=0)
    if workspace_tokens < unit and -(-longest // turn) * turn > workspace_tokens:
        raise InvalidSpecError(
            f"a workspace of {workspace_tokens} tokens holds neither a context of {longest} nor "
            f"a piece of it: contexts are cut at multiples of {unit} tokens; workspace_tokens "
            f"must be at least {unit}",
            workspace_tokens=workspace_tokens,
            unit=unit,
        )
    chunks: list[list[ContextSpan]] = []
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
            chunks[-1].append(ContextSpan(req, start, take))
            start, room = start + take, room - -(-take // turn) * turn
    return chunks


class ContextPart:
    """Plans spans on the host from upper bounds and describes them on the device."""

    def __init__(
        self, layout: BlockTableLayout, device: torch.device, workspace_tokens: int
    ) -> None:
        """Check that the workspace holds every context, or the smallest span that may be cut.

        Raises:
            InvalidSpecError: It does not.
        """
        self._addressing = addressing = layout.addressing
        self._device = device
        # the first token of a span is the first of a kernel block on every rank
        per_rank = math.lcm(addressing.kernel_block_size, addressing.interleave)
        self._unit = _on_all_ranks(layout, per_rank)
        self._turn = _on_all_ranks(layout, addressing.interleave)
        self._workspace_tokens = workspace_tokens
        longest = -(-addressing.max_tokens // self._turn) * self._turn
        least = min(self._unit, longest)
        if workspace_tokens < least:
            raise InvalidSpecError(
                f"MLAOptions.workspace_tokens is {workspace_tokens} and must be at least {least}: "
                f"contexts of up to {addressing.max_tokens} tokens are cut at multiples of "
                f"{self._unit} (shards {addressing.shards}, kernel blocks of "
                f"{addressing.kernel_block_size}, interleave {addressing.interleave})",
                workspace_tokens=workspace_tokens,
                unit=self._unit,
                least=least,
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
            turn=self._turn,
        )
        return tuple(self._describe(spans, context_lens) for spans in chunks)

    def _describe(self, spans: list[ContextSpan], context_lens: torch.Tensor) -> MLAContextChunk:
        num_reqs = context_lens.numel()
        plan = np.zeros((2, num_reqs), dtype=np.int32)
        for span in spans:
            plan[:, span.req] = span.start, span.length
        local_ends = (
            # of the first rank, which keeps the most of any span
            addressed_lengths(self._addressing, plan[1], 0).cumsum(dtype=np.int32)
        )
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
            local_starts=localise(starts, self._addressing),
            local_seq_lens=localise(lens, self._addressing),
            local_cu_seq_lens=local_cu,
            num_local_rows=num_local_rows,
            gathered_rows=self._gathered_rows(
                places, token_to_req, cu_seq_lens, local_cu, num_local_rows
            ),
        )

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
        # ``index_select`` is several times as fast as an index on a CPU
        offsets = (places - cu_seq_lens.index_select(0, token_to_req)).long()
        rank, local = spread(self._addressing, offsets)
        rows = rank * num_local_rows + local_cu.index_select(0, token_to_req) + local
        return rows.masked_fill(token_to_req == cu_seq_lens.numel() - 1, 0)


def _after_zero(ends: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(ends, (1, 0))


def _on_all_ranks(layout: BlockTableLayout, num_tokens: int) -> int:
    """Return the tokens of which each rank keeps ``num_tokens``, a divisor of its block."""
    return layout.tokens_per_block // (layout.block_size // num_tokens)
