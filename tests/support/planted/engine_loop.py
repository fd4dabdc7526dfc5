"""The runner's engine as a loop that faults are planted into, between tables and sanitizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from tests.support.planted.loop import Loop, Planted
from tests.support.small_engine import SmallRequest, SmallStep

from bt_runner.engine import Engine
from bt_runner.model_runner import TableGuard
from bt_runner.scheduler import SchedulerOutput
from bt_tables import BlockTableSanitizer
from bt_tables.sanitizer import SanitizerReport
from bt_width import ServingLimits

T = TypeVar("T")


class NotInThisStepError(Exception):
    """A step has not what a fault needs; the next one may have it."""


@dataclass(frozen=True)
class _OneStep:
    """The engine as a fault sees it: the step it is in."""

    current: SmallStep
    limits: ServingLimits

    def step(self) -> SmallStep:
        return self.current


class EngineLoop(Loop):
    """Gives a fault the engine's own step; a fault that needs another one waits for it.

    The first step is always sound: the sanitizer learns from it where the tensors lie.
    """

    def __init__(self, engine: Engine) -> None:
        self.layouts = engine.layouts
        self.num_blocks = [pool.num_blocks for pool in engine.pools]
        self.last: SmallStep | None = None
        self.last_tables: list[torch.Tensor] = []
        self._limits = engine.layouts[0].limits

    def enter(self, step: SmallStep) -> None:
        """Begin a step."""
        self._current = step
        self.engine = _OneStep(step, self._limits)  # type: ignore[assignment]  # all that is used

    def leave(self) -> None:
        """Keep what a sound step held."""
        self.last = self._current
        self.last_tables = [table.clone() for table in self._current.block_tables]

    def until(self, wanted: Callable[[SmallStep], T | None]) -> tuple[SmallStep, T]:
        """Return the step that the engine is in, if it has what is wanted."""
        return self._found(self._current, wanted)

    def after(self, wanted: Callable[[SmallStep], T | None]) -> tuple[SmallStep, T]:
        """Return the step before, if it had what is wanted."""
        return self._found(self.require_a_step_before(), wanted)

    def require_a_step_before(self) -> SmallStep:
        """Return the step before."""
        if self.last is None:
            raise NotInThisStepError
        return self.last

    @staticmethod
    def _found(step: SmallStep, wanted: Callable[[SmallStep], T | None]) -> tuple[SmallStep, T]:
        found = wanted(step)
        if found is None:
            raise NotInThisStepError
        return step, found


@contextmanager
def planting(engine: Engine, plant: Callable[[Loop], Planted]) -> Iterator[list[Planted]]:
    """Plant a fault into the first step that has what it needs; give what was planted."""
    loop = EngineLoop(engine)
    planted: list[Planted] = []
    guard_check, check = TableGuard.check, BlockTableSanitizer.check
    batch: list[SchedulerOutput] = []

    def note_batch(self: TableGuard, scheduled: SchedulerOutput, *rest: Any) -> None:
        batch[:] = [scheduled]
        guard_check(self, scheduled, *rest)

    def spoilt(self: BlockTableSanitizer, *tensors: Any, **counts: Any) -> SanitizerReport:
        if planted:
            return check(self, *tensors, **counts)
        loop.enter(_small_step(engine, batch[0], *tensors, **counts))
        try:
            loop.require_a_step_before()
            planted.append(plant(loop))
        except NotInThisStepError:
            report = check(self, *tensors, **counts)
            loop.leave()
            return report
        return check(self, *_arguments(planted[0].step), **_counts(planted[0].step))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableGuard, "check", note_batch)
        patch.setattr(BlockTableSanitizer, "check", spoilt)
        yield planted


def _small_step(
    engine: Engine,
    batch: SchedulerOutput,
    block_tables: tuple[torch.Tensor, ...],
    slot_mappings: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    num_blocks_of_row: torch.Tensor,
    ref_counts: list[torch.Tensor],
    ref_blocks: list[torch.Tensor] | None = None,
) -> SmallStep:
    kv, groups = engine._scheduler.kv, range(len(engine.layouts))
    requests = [
        SmallRequest(row, request.max_len, [kv.block_ids_of(row, group) for group in groups], start)
        for row, request, start in zip(
            batch.rows.tolist(), batch.requests, batch.starts.tolist(), strict=True
        )
    ]
    return SmallStep(
        block_tables=block_tables,
        slot_mappings=slot_mappings,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        num_blocks_of_row=num_blocks_of_row,
        ref_counts=tuple(ref_counts),
        ref_blocks=tuple(ref_blocks or ()),
        requests=tuple(requests),
    )


def _arguments(step: SmallStep) -> tuple[Any, ...]:
    return step.block_tables, step.slot_mappings, step.seq_lens, step.query_start_loc


def _counts(step: SmallStep) -> dict[str, Any]:
    return {"num_blocks_of_row": step.num_blocks_of_row, "ref_counts": step.ref_counts}
