"""Remembers which blocks vLLM's scheduler gave to each request, as its outputs say."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bt_tables.sanitizer import FaultKind, Finding
from bt_tables.sanitizer.reference import reach_of
from bt_width import NULL_BLOCK

from .layouts import PlannedGroup

_EDITS_KEPT = 8
_IDS_SHOWN = 6

Ids = npt.NDArray[np.int32]


class _Request:
    """What a request was given so far.

    Attributes:
        blocks: [groups] int32, its block ids in order.
        num_computed: Tokens computed when it was last scheduled, as the scheduler counts them.
        num_uncertain: The most of them that may turn out to be rejected drafts.
        num_drafts: Drafts of the step in which it was last scheduled.
        edits: Its last edits, oldest first.
    """

    def __init__(self, blocks: list[Ids], num_computed: int) -> None:
        self.blocks = blocks
        self.num_computed = num_computed
        self.num_uncertain = 0
        self.num_drafts = 0
        self.edits: deque[str] = deque(maxlen=_EDITS_KEPT)


class GivenBlocks:
    """The blocks of every request that the scheduler knows to be resident.

    It follows the scheduler's outputs alone and never looks at a table, so that a table that
    went wrong on the way cannot agree with it.
    """

    def __init__(self, groups: Sequence[PlannedGroup], num_blocks: int) -> None:
        """Start with no request; ``num_blocks`` is the size of the pool that all groups share."""
        self._groups = tuple(groups)
        self._num_blocks = num_blocks
        self._requests: dict[str, _Request] = {}
        self._step = 0

    def follow(self, output: Any) -> None:
        """Take over what a ``SchedulerOutput`` gives and takes away."""
        self._step += 1
        for request_id in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._replace(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._replace(request_id, blocks, num_computed)
            else:
                self._append(request_id, blocks, num_computed)
        for request_id, drafts in output.scheduled_spec_decode_tokens.items():
            if request_id in self._requests:
                self._requests[request_id].num_drafts = len(drafts)

    def knows(self, request_ids: Sequence[str]) -> bool:
        """Whether every one of the requests was scheduled since the checks began."""
        return all(request_id in self._requests for request_id in request_ids)

    def rows(self, request_ids: Sequence[str]) -> list[torch.Tensor]:
        """Return the blocks of some requests, [N, blocks] for each group, null past the last."""
        return [
            _padded([self._requests[name].blocks[at] for name in request_ids])
            for at in range(len(self._groups))
        ]

    def counts(self, request_ids: Sequence[str]) -> torch.Tensor:
        """Return how many blocks some requests hold, [N, groups]."""
        counts = [[len(ids) for ids in self._requests[name].blocks] for name in request_ids]
        return torch.tensor(counts, dtype=torch.int32).view(len(request_ids), len(self._groups))

    def holders(self) -> torch.Tensor:
        """Return how many rows of all groups hold each block of the pool, [num_blocks].

        Blocks that no later step of a request reads are taken for given back: those behind a
        window, and those of states before the last.
        """
        requests = list(self._requests.values())
        computed = torch.tensor(
            [request.num_computed - request.num_uncertain for request in requests],
            dtype=torch.int64,
        )
        held = [np.zeros(0, dtype=np.int32)]
        for at, group in enumerate(self._groups):
            first = reach_of(group.layout.addressing, computed, computed).read_from.tolist()
            held += [
                request.blocks[at][start:] for request, start in zip(requests, first, strict=True)
            ]
        ids = np.concatenate(held)
        ids = ids[(ids > NULL_BLOCK) & (ids < self._num_blocks)]
        counts = np.bincount(ids, minlength=self._num_blocks)
        return torch.from_numpy(counts.astype(np.int32))

    def written_twice(self, request_ids: Sequence[str]) -> Iterator[Finding]:
        """Yield blocks that two requests hold where each has still to write its tokens.

        A block may have many holders that only read it, and one that computes it for them.
        """
        rows = {name: row for row, name in enumerate(request_ids)}
        writers: dict[int, tuple[str, int]] = {}
        for name, request in self._requests.items():
            for at, group in enumerate(self._groups):
                first = _first_unfilled(group, request.num_computed)
                for column, block in enumerate(request.blocks[at][first:].tolist(), start=first):
                    if block == NULL_BLOCK:
                        continue
                    other, _ = writers.setdefault(block, (name, group.index))
                    if writers[block] != (name, group.index) and {name, other} & rows.keys():
                        yield Finding(
                            kind=FaultKind.SHARED_WRITE,
                            group=group.index,
                            row=rows.get(name),
                            request=name,
                            column=column,
                            value=block,
                            other_owner=other,
                        )

    def edits_of(self, request_id: str) -> tuple[str, ...]:
        """Return a request's last edits, oldest first."""
        request = self._requests.get(request_id)
        return () if request is None else tuple(request.edits)

    def _replace(self, request_id: str, blocks: Sequence[Sequence[int]], computed: int) -> None:
        old = self._requests.get(request_id)
        held = self._ids(blocks)
        request = _Request(held, computed)
        if old is not None:
            request.edits.extend(old.edits)
        self._requests[request_id] = request
        self._note(request, "given", held)

    def _append(
        self, request_id: str, blocks: Sequence[Sequence[int]] | None, computed: int
    ) -> None:
        request = self._requests.get(request_id)
        if request is None:
            # it was scheduled before the checks began
            return
        request.num_computed = computed
        # an asynchronous scheduler counts drafts before it knows which are accepted
        request.num_uncertain, request.num_drafts = request.num_drafts, 0
        if blocks is None:
            return
        added = self._ids(blocks)
        request.blocks = [
            np.concatenate([held, ids]) if ids.size else held
            for held, ids in zip(request.blocks, added, strict=True)
        ]
        self._note(request, "appended", added)

    def _ids(self, blocks: Sequence[Sequence[int]]) -> list[Ids]:
        return [np.array(blocks[group.index], dtype=np.int32) for group in self._groups]

    def _note(self, request: _Request, verb: str, blocks: Sequence[Ids]) -> None:
        parts = [
            f"group {group.index}: {_shown(ids)}"
            for group, ids in zip(self._groups, blocks, strict=True)
            if ids.size
        ]
        if parts:
            request.edits.append(f"scheduler output {self._step} {verb} {'; '.join(parts)}")


def _first_unfilled(group: PlannedGroup, num_computed: int) -> int:
    """Return the first column whose block the request has still to write to."""
    addressing = group.layout.addressing
    if addressing.advances:
        return num_computed // group.layout.tokens_per_block
    # a state that never moves on is written in every step
    return num_computed // addressing.tokens_per_state_column


def _shown(ids: Ids) -> str:
    shown = ", ".join(map(str, ids[:_IDS_SHOWN].tolist()))
    return shown if len(ids) <= _IDS_SHOWN else f"{shown}, ... ({len(ids)} blocks)"


def _padded(rows: Sequence[Ids]) -> torch.Tensor:
    padded = np.zeros((len(rows), max(map(len, rows), default=0)), dtype=np.int32)
    for at, ids in enumerate(rows):
        padded[at, : len(ids)] = ids
    return torch.from_numpy(padded)
