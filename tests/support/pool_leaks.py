"""No runner test may lose a block: what a pool has given out, some row or prefix holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from bt_runner.scheduler import Scheduler
from bt_width import NULL_BLOCK


@pytest.fixture
def loses_blocks() -> None:
    """Let a test lose blocks on purpose."""


@pytest.fixture(autouse=True)
def no_pool_leaks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Check the reference counts of every scheduler that a test made, when the test ends."""
    schedulers: list[Scheduler] = []
    make = Scheduler.__init__

    def noted(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        schedulers.append(self)

    monkeypatch.setattr(Scheduler, "__init__", noted)
    yield
    if "loses_blocks" not in request.fixturenames:
        for scheduler in schedulers:
            require_true_counts(scheduler)


def require_true_counts(scheduler: Scheduler) -> None:
    """Fail where a pool counts other holders than there are, or a block is nowhere."""
    for index, group in enumerate(scheduler.kv.groups):
        held: Counter[int] = Counter()
        for row in scheduler.running.tolist():
            ids = scheduler.kv.block_ids_of(row, index)
            held.update(block for block in ids if block != NULL_BLOCK)
        counted = dict(enumerate(group.pool.references.tolist()))
        assert {block: count for block, count in counted.items() if count} == held
        pool = group.pool
        assert pool.num_free + pool.num_used + pool.num_cooling == pool.capacity
