"""The figures of a replay, as JSON and as text."""

from __future__ import annotations

import json

import pytest

from bt_runner.replay.summary import Summary


def _summary() -> Summary:
    return Summary(
        groups=("mla", "mamba"),
        num_requests=2,
        num_steps=4,
        num_launches=4,
        num_copies=4,
        num_bytes=4000,
        pool_blocks=(9, 5),
        table_seconds=[1e-3, 2e-3, 3e-3, 10e-3],
        builder_seconds=[1e-4] * 4,
        used_blocks=[[1, 2], [3, 2], [8, 2], [4, 0]],
    )


def test_the_record_is_json_and_holds_medians_peaks_and_means() -> None:
    record = json.loads(json.dumps(_summary().to_record()))

    assert record["bytes_per_step"] == 1000
    assert record["launches_per_step"] == 1.0
    assert record["table_update_us"] == {"median": 2500.0, "p99": pytest.approx(9790.0)}
    assert record["groups"] == [
        {"name": "mla", "pool_blocks": 9, "peak_blocks": 8, "mean_blocks": 4},
        {"name": "mamba", "pool_blocks": 5, "peak_blocks": 2, "mean_blocks": 2},
    ]


def test_the_text_names_every_group() -> None:
    text = _summary().to_text()

    assert "blocks of mla         8 at peak, 4 on average, of 9" in text
    assert "blocks of mamba" in text
    assert "2,500 us median" in text


def test_a_replay_without_steps_has_figures_too() -> None:
    summary = Summary(groups=("mla",), pool_blocks=(2,))

    assert summary.to_record()["bytes_per_step"] == 0
    assert "0 in 0.0 s" in summary.to_text()
