"""The check at the end of every runner test can fail."""

from __future__ import annotations

import pytest
from tests.bt_runner.harness import greedy_traffic, tiny_engine
from tests.support.pool_leaks import require_true_counts

from bt_runner.engine import Engine


def _engine() -> Engine:
    traffic = greedy_traffic(1, (9, 20), max_new_tokens=4)
    engine = tiny_engine()
    for prompt, params in zip(traffic.prompts, traffic.params, strict=True):
        engine.add_request(prompt, params)
    engine.step()
    return engine


def test_requests_under_way_are_no_leak() -> None:
    require_true_counts(_engine()._scheduler)


@pytest.mark.usefixtures("loses_blocks")
def test_a_block_that_no_request_holds_is_a_leak() -> None:
    engine = _engine()
    engine._scheduler.kv.groups[1].held[engine._scheduler.running[0]] -= 1

    with pytest.raises(AssertionError):
        require_true_counts(engine._scheduler)


@pytest.mark.usefixtures("loses_blocks")
def test_a_block_that_two_requests_hold_and_one_took_is_found() -> None:
    engine = _engine()
    first, second = engine._scheduler.running
    block_ids = engine._scheduler.kv.groups[0].block_ids
    block_ids[second, 0] = block_ids[first, 0]

    with pytest.raises(AssertionError):
        require_true_counts(engine._scheduler)
