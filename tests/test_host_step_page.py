"""The page of ``benchmarks/host_step.py``: what its steps did, and the figures it printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest
from benchmarks import host_step
from benchmarks.step_page import NotedSteps

from bt_tables.devices import CpuExecutor


def test_steps_are_noted_as_the_engine_ran_them() -> None:
    with host_step.carrying_nothing_out():
        loop = host_step.make_loop(3, 2)
        noted = NotedSteps(loop, ("attention", "window"), ("schedule",), lambda: [0.0])
        arrivals = host_step.Arrivals(loop)
        used, running = [], []
        with noted.counting():
            for _ in range(5):
                arrivals.add(num_new=9)
                noted.step()
                used.append([pool.num_used for pool in loop.pools])
                running.append(len(loop._scheduler.running))

    series = noted.recorder.series()

    assert series.groups == ("attention", "window")
    assert series.pool_blocks == tuple(pool.capacity for pool in loop.pools)
    assert series.used_blocks.tolist() == used
    assert series.running.tolist() == running == [1, 2, 3, 4, 4]
    assert series.waiting.tolist() == [0, 0, 0, 0, 1]
    lengths = [request.prompt_len for request in loop._scheduler.requests.values()]
    assert series.prompt_tokens.tolist() == lengths
    assert series.preempted.tolist() == [0] * 5
    assert series.phases == ("schedule", "the rest")
    assert (series.phase_seconds[:, 1] > 0).all()


def test_bytes_are_those_of_both_copies_of_a_step() -> None:
    """The packet of edits, and a batch of two: 8 parts and 3 of their choices, 64 bytes each."""
    with host_step.carrying_nothing_out():
        loop = host_step.steady_loop(2, 1, prefix_caching=True)
        noted = NotedSteps(loop, ("attention",), (), list)
        with mock.patch.object(CpuExecutor, "copy") as copy, noted.counting():
            noted.step()

    (packet,) = (call.args[-1] for call in copy.call_args_list)
    assert noted.recorder.series().bytes_sent.tolist() == [packet.nbytes + 64 * (8 + 3)]


def test_the_page_has_the_figures_that_were_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vl_convert")
    path = tmp_path / "steps.html"

    with host_step.carrying_nothing_out():
        times = host_step.report(3, 2, 4, by_phase=False)
        host_step.write_page(path, 3, 2, 4, times)

    page = path.read_text(encoding="utf-8")
    printed = re.findall(r"best [^;\n]*", capsys.readouterr().out)
    assert len(printed) == 3
    assert [line for line in printed if line not in page] == []
    record = re.search(r'id="record">(.*?)</script>', page)
    assert record
    assert json.loads(record[1])["steady"]["best_us"] == min(times["steady"])
    assert "Blocks of window in use" in page
