"""No runner test may lose a block: what a pool has given out, some request holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from bt_runner.replay.sharing.rows import SharedRows
from bt_runner.scheduling.scheduler import Scheduler
from bt_width import NULL_BLOCK


@pytest.fixture
def loses_blocks() -> None:
    """Let a test lose blocks on purpose."""


@pytest.fixture(autouse=True)
def no_pool_leaks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Check the books of every scheduler that a test made, when the test ends."""
    schedulers: list[Scheduler] = []
    make = Scheduler.__init__

    def noted(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        schedulers.append(self)

    monkeypatch.setattr(Scheduler, "__init__", noted)
    yield
    if "loses_blocks" not in request.fixturenames:
        for scheduler in schedulers:
            require_true_books(scheduler)


def require_true_books(scheduler: Scheduler) -> None:
    """Fail where a pool counts other holders than there are, or a block is nowhere."""
    rows = scheduler._rows
    for group, pool in enumerate(rows.pools):
        held: Counter[int] = Counter()
        if isinstance(rows, SharedRows):
            held.update(rows.prefixes.held_blocks(group))
        for running in scheduler.running:
            held.update(block for block in running.block_ids[group] if block != NULL_BLOCK)
        counted = dict(enumerate(pool.reference_counts()))
        assert {block: count for block, count in counted.items() if count} == held
        assert pool.num_free + pool.num_used + pool.num_cooling == pool.capacity
