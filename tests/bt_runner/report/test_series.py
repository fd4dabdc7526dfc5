"""Numbers of steps: made of totals, thinned without losing a peak, written as a safe page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.support.series import random_series

from bt_runner.errors import BadInputError
from bt_runner.report.page import render, write_report
from bt_runner.report.series import StepRecorder, StepTotals, thinned

HOSTILE = "</script><img src=x onerror=alert(1)>"


def page(title: str = "a run") -> str:
    return render(title, {title: title}, {"title": title}, random_series(50, name=title), script="")


def test_totals_become_numbers_of_steps() -> None:
    recorder = StepRecorder(("mla",), (9,), ("tables", "rest"))
    for step in (1, 2, 3):
        recorder.note(
            StepTotals(
                used_blocks=[step],
                running=step,
                waiting=0,
                preemptions=step // 3,
                prompt_tokens=10 * step,
                hit_tokens=5,
                num_bytes=100 * step * step,
                phase_seconds=(0.1, 0.2),
            )
        )

    series = recorder.series()

    assert series.used_blocks.tolist() == [[1], [2], [3]]
    assert series.preempted.tolist() == [0, 0, 1]
    assert series.preemptions.tolist() == [2]
    assert series.bytes_sent.tolist() == [100, 300, 500]
    assert series.hit_share.tolist() == [0.5, 0.25, 5 / 30]
    assert series.phase_seconds.tolist() == [[0.1, 0.2]] * 3


def test_a_run_without_a_step_has_no_numbers_and_no_page(tmp_path: Path) -> None:
    series = StepRecorder(("mla",), (9,), ("tables",)).series()

    assert series.num_steps == 0
    with pytest.raises(BadInputError, match="no step"):
        write_report(tmp_path / "x.html", "a run", {}, {}, series)


def test_a_short_curve_stays_whole() -> None:
    assert thinned(np.arange(480)) == list(range(480))


def test_a_long_curve_keeps_its_ends_and_every_peak() -> None:
    curve = np.zeros(20_000, dtype=np.int64)
    peaks = [7, 5_000, 5_001, 19_998]
    curve[peaks] = [9, 5, -5, 3]

    kept = thinned(curve)

    assert {0, 19_999, *peaks} <= set(kept)
    assert len(kept) <= 242
    assert kept == sorted(set(kept))


def test_a_string_cannot_become_markup() -> None:
    text = page(HOSTILE)

    assert "<img" not in text
    assert json.loads(element(text, "record")) == {"title": HOSTILE}


def test_a_page_loads_nothing() -> None:
    """No address outside the data: every source of it is the page itself."""
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", page()) == []


def element(text: str, name: str) -> str:
    found = re.search(rf'id="{name}">(.*?)</script>', text)
    assert found
    return found[1]


def test_the_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")

    with pytest.raises(BadInputError, match="cannot write"):
        write_report(tmp_path / "no" / "x.html", "a run", {}, {}, random_series(3))


def test_without_the_extra_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)

    with pytest.raises(BadInputError, match=re.escape("install bt-runner[report]")):
        write_report(tmp_path / "x.html", "a run", {}, {}, random_series(3))
