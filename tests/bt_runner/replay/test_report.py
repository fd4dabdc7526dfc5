"""What a replay says beyond its figures: a page, an interrupted run, blocks that share nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support import model_configs
from tests.support.model_configs import write_config

from bt_runner.cli import run
from bt_runner.replay.loop import Replay
from bt_runner.replay.traffic.trace import TraceRequest, longest_common_beginning


def command(folder: Path, trace: str, *options: str) -> list[str]:
    path = folder / "trace"
    path.write_text(trace)
    config = write_config(folder, model_configs.glm_5_2())
    limits = ("--max-model-len", "20000", "--max-num-seqs", "8")
    return ["replay", str(path), "--config", str(config), *limits, *options]


def mooncake(*requests: tuple[int, list[int]]) -> str:
    lines = [
        {"timestamp": 0, "input_length": length, "output_length": 3, "hash_ids": ids}
        for length, ids in requests
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_the_page_has_the_numbers_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vl_convert")
    page = tmp_path / "run.html"

    assert run(command(tmp_path, "100,5\n70,9\n", "--json", "--report", str(page))) == 0

    record = json.loads(capsys.readouterr().out)
    text = page.read_text(encoding="utf-8")
    found = re.search(r'id="record">(.*?)</script>', text)
    assert found
    assert json.loads(found[1]) == record
    assert "2 ended, 0 refused" in text


def test_ctrl_c_prints_the_figures_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Replay._step

    def interrupted(self: Replay) -> None:
        if self.summary.num_steps == 3:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(Replay, "_step", interrupted)

    code = run(command(tmp_path, "100,50\n70,90\n"))

    out, err = capsys.readouterr()
    assert code == 130
    assert err == "interrupted: the figures so far\n"
    assert re.search(r"^steps +3 in", out, re.MULTILINE)


def test_blocks_longer_than_what_prompts_share_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 ranks and blocks of 512 are blocks of 4,096 tokens; the prompts share 1,024."""
    trace = mooncake((5_000, [*range(10)]), (5_000, [0, 1, *range(20, 28)]))

    assert run(command(tmp_path, trace, "--dcp", "8", "--block-size", "512")) == 0
    assert "which are 4,096 tokens over all ranks" in capsys.readouterr().err
    assert run(command(tmp_path, trace, "--block-size", "512")) == 0
    assert "warning" not in capsys.readouterr().err


def test_the_longest_common_beginning_is_one_from_the_start() -> None:
    def request(*hash_ids: int, prompt_len: int = 10_000) -> TraceRequest:
        return TraceRequest(
            line=1, prompt_len=prompt_len, output_len=1, hash_ids=hash_ids, hash_tokens=100
        )

    assert longest_common_beginning([]) == 0
    assert longest_common_beginning([request(1, 2), request(3, 2)]) == 0
    assert longest_common_beginning([request(1, 2, 3), request(4), request(1, 2, 9, 3)]) == 200
    assert longest_common_beginning([request(1, 2), request(1, 2, prompt_len=150)]) == 150
