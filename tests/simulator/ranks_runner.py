"""Runs every step on all ranks of a context-parallel group, in one process."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn, cast

import numpy as np
import torch
from tests.simulator.counts import Counts
from tests.simulator.rank import Rank
from tests.simulator.table_checks import NUM_CLASSES

from bt_runner.arrays import Ints
from bt_runner.errors import VerificationError
from bt_runner.kv_cache_manager import TableEdits
from bt_runner.model_runner import InFlightStep, ModelRunner
from bt_runner.requests import RunningRequests
from bt_runner.scheduler import SchedulerOutput

BROKEN = 0.002
"""The chance of each of the three."""


class BrokenStepError(Exception):
    """A step that failed in the middle."""


class RanksRunner(ModelRunner):
    """The ranks' model runners in step; now and then a step fails.

    It fails where a rank has edited its rows or not, when the device reports it, or when
    states are committed; then no rank's caches may be trusted any more.
    """

    def __init__(self, ranks: Sequence[Rank], draw: random.Random, counts: Counts) -> None:
        """Take the ranks, and what is left to chance and counted."""
        self.layouts = ranks[0].runner.layouts
        self._ranks = ranks
        self._draw = draw
        self._counts = counts
        self._layout_of = ranks[0].model.token_layouts
        self._in_flight: deque[tuple[int, list[InFlightStep]]] = deque(maxlen=2)

    def launch(
        self,
        step: int,
        batch: SchedulerOutput,
        edits: TableEdits,
        table: RunningRequests,
        *,
        records: bool = False,
    ) -> InFlightStep:
        """Run a step on all ranks.

        Raises:
            BrokenStepError: It failed on one of them.
            VerificationError: A token does not lie where it should, or ranks chose otherwise.
        """
        broken = self._draw.randrange(len(self._ranks)) if self._breaks() else None
        of_ranks = []
        for index, rank in enumerate(self._ranks):
            if index == broken:
                if self._draw.random() < 0.5:
                    rank.stage(batch, edits)
                self._break_off()
            of_ranks.append(rank.launch(step, batch, edits, table))
        self._require_placed()
        first = of_ranks[0]
        for other in of_ranks[1:]:
            if (other.chosen != first.chosen).any():
                raise VerificationError("ranks choose different tokens")
        self._in_flight.append((step, of_ranks))
        checks = [rank.checks for rank in self._ranks if rank.checks is not None]
        self._counts.num_checks += len(checks) * NUM_CLASSES
        self._counts.num_oracle_steps += any(each.is_derived for each in checks)
        self._counts.note_step(batch, is_padded=len(first.rows) > len(batch.rows))
        return replace(first, event=cast(torch.cuda.Event, _End(self)))

    def commit_drafts(self, in_flight: InFlightStep, num_kept: Ints) -> bool:
        """Copy states on all ranks, now that drafts are decided."""
        broken = self._draw.randrange(len(self._ranks)) if self._breaks() else None
        on_device = False
        (of_ranks,) = [of_ranks for step, of_ranks in self._in_flight if step == in_flight.step]
        for index, (rank, of_rank) in enumerate(zip(self._ranks, of_ranks, strict=True)):
            if index == broken:
                self._break_off()
            on_device = rank.runner.commit_drafts(of_rank, num_kept)
        return on_device

    def invalidate(self) -> None:
        """Mark all ranks' device rows stale: a step failed."""
        for rank in self._ranks:
            rank.invalidate()

    def remap(self) -> None:
        """Write all that lies on the ranks' devices anew: their memory was mapped again."""
        for rank in self._ranks:
            rank.remap()

    def dummy_step(self, num_reqs: int, query_len: int) -> None:
        """Run a batch of padding on all ranks."""
        for rank in self._ranks:
            rank.dummy_step(num_reqs, query_len)

    def _require_placed(self) -> None:
        """Refuse a step whose tokens lie on too few ranks or on too many."""
        for group, layout in self._layout_of.items():
            counts = np.sum([rank.model.is_placed[group] for rank in self._ranks], axis=0)
            wanted = 1 if layout.shards > 1 else len(self._ranks)
            wrong = counts != wanted
            if wrong.any():
                token = int(wrong.argmax())
                raise VerificationError(
                    f"group {group}: token {token} of the batch lies on {counts[token]} ranks, "
                    f"not on {wanted}",
                    group=group,
                    expected=wanted,
                    found=int(counts[token]),
                )

    def _breaks(self) -> bool:
        return self._draw.random() < BROKEN

    def _break_off(self) -> NoReturn:
        for rank in self._ranks:
            rank.model.forget()
        raise BrokenStepError


class _End:
    """Comes when the device has ended a step, or says that it failed."""

    def __init__(self, runner: RanksRunner) -> None:
        self._runner = runner

    def synchronize(self) -> None:
        if self._runner._breaks():
            self._runner._break_off()
