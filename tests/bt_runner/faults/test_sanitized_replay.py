"""``bt-runner replay --sanitize`` sees in each step what the contract would see in some."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.model_configs import glm_5_2, write_config
from tests.support.replays import own_trace, share_too_much

from bt_runner.cli import run

OPTIONS = [
    *("--max-model-len", "350000", "--dcp", "2", "--speculative-tokens", "3"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "1024", "--verify-every", "1000000"),
]


def _command(folder: Path, num_requests: int) -> list[str]:
    trace = folder / "trace.jsonl"
    lines = [
        json.dumps(
            {
                "timestamp": request.arrival_ms,
                "input_length": request.prompt_len,
                "output_length": request.output_len,
                "hash_ids": request.hash_ids,
            }
        )
        for request in own_trace(num_requests)
    ]
    trace.write_text("\n".join(lines), encoding="utf-8")
    config = write_config(folder, glm_5_2())
    return ["replay", str(trace), "--config", str(config), *OPTIONS]


def test_a_sound_replay_of_shared_prompts_has_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([*_command(tmp_path, 12), "--sanitize", "--json"])

    record = json.loads(capsys.readouterr().out)
    assert code == 0
    assert record["num_requests"] == 12
    assert record["hit_tokens"] > 0


@pytest.mark.parametrize(
    ("options", "code"),
    [pytest.param(["--sanitize"], 1, id="sanitized"), pytest.param([], 0, id="unseen-without")],
)
def test_a_write_to_a_shared_block_ends_with_1_in_its_step(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    code: int,
) -> None:
    """Reported as https://github.com/vllm-project/vllm-ascend/pull/12502"""
    command = _command(tmp_path, 30)
    share_too_much(monkeypatch)
    # the reference counts are compared at the end, and there nothing is wrong
    assert run([*command, *options]) == code

    said = capsys.readouterr().err
    assert ("shared-write" in said) == bool(options)
    assert said.startswith("error: step ") == bool(options)
    assert said.count("step ") == len(options) + said.count("the step ")
