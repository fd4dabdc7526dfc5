"""``bt-runner plan`` prints a model's plan, and names what it cannot plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support import model_configs
from tests.support.model_configs import data_file, write_config

from bt_runner.cli import run

GLM_OPTIONS = ["--max-model-len", "350000", "--dcp", "2", "--speculative-tokens", "3"]


def test_a_table_shows_every_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, model_configs.nemotron_h_8b())

    code = run(["plan", "--config", str(config)])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == ["group", "attention", "mamba"]
    assert "102,137,856" in lines[2]


def test_json_holds_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, model_configs.glm_5_2())

    code = run(["plan", "--config", str(config), *GLM_OPTIONS, "--json"])

    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert code == 0
    assert (group["blocks_per_request"], group["width"]) == (2735, 2736)
    assert group["table_bytes"] == 256 * 2736 * 4
    assert group["cache_bytes_per_token"] == 89_856 + 21 * 132
    assert [member["layers"] for member in group["members"]] == [78, 21]


def test_explain_says_how_a_width_came_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model_configs.glm_5_2())

    run(["plan", "--config", str(config), *GLM_OPTIONS, "--explain"])

    out = capsys.readouterr().out
    assert "max_model_len 350000 / (block 64 x 2 shards) = 2735 blocks" in out
    assert "mla: 89,856 bytes per token" in out


def test_a_model_without_a_length_needs_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path, model_configs.mamba2()))

    refused = run(["plan", "--config", config])
    planned = run(["plan", "--config", config, "--max-model-len", "4096"])

    assert (refused, planned) == (2, 0)
    assert "--max-model-len" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(["--config", "nowhere.json"], "nowhere.json", id="no-file"),
        pytest.param(["--block-size", "0"], "--block-size", id="block-size"),
        pytest.param(["--interleave", "5", "--dcp", "2"], "interleave", id="interleave"),
        pytest.param(["--dcp-rank", "1"], "rank", id="rank"),
    ],
)
def test_what_makes_no_plan_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    config = write_config(tmp_path, model_configs.glm_5_2())

    code = run(["plan", "--config", str(config), *options])

    assert code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        pytest.param("deepseek-ai--DeepSeek-R1", [70_272], id="deepseek-r1"),
        pytest.param("deepseek-ai--DeepSeek-V2-Lite", [31_104], id="deepseek-v2-lite"),
        pytest.param("deepseek-ai--DeepSeek-V3", [70_272], id="deepseek-v3"),
        pytest.param("deepseek-ai--DeepSeek-V3.2", [70_272 + 61 * 132], id="deepseek-v3.2"),
        pytest.param("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", [6144, 0], id="nemotron-nano"),
        pytest.param("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8", [8192, 0], id="super"),
        pytest.param("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", [12_288, 0], id="ultra"),
        pytest.param("nvidia--Nemotron-H-56B-Base-8K", [40_960, 0], id="nemotron-h-56b"),
        pytest.param("nvidia--Nemotron-H-8B-Base-8K", [16_384, 0], id="nemotron-h-8b"),
        pytest.param("tiiuae--Falcon-H1-0.5B-Base", [18_432, 0], id="falcon-h1"),
        pytest.param("zai-org--GLM-5", [89_856 + 78 * 132], id="glm-5"),
        pytest.param("zai-org--GLM-5.1", [89_856 + 78 * 132], id="glm-5.1"),
        pytest.param("zai-org--GLM-5.2", [89_856 + 21 * 132], id="glm-5.2"),
    ],
)
def test_published_configs_are_planned(
    capsys: pytest.CaptureFixture[str], name: str, token_bytes: list[int]
) -> None:
    config = data_file("configs", f"{name}.json")

    code = run(["plan", "--config", str(config), "--json"])

    groups = json.loads(capsys.readouterr().out)["groups"]
    assert code == 0
    assert [group["cache_bytes_per_token"] for group in groups] == token_bytes


@pytest.mark.parametrize(
    ("name", "word"),
    [
        pytest.param("state-spaces--mamba2-2.7b", "model_type", id="original-mamba-format"),
        pytest.param("ai21labs--Jamba-v0.1", "jamba", id="mamba-1"),
        pytest.param("deepseek-ai--DeepSeek-V4-Flash", "deepseek_v4", id="deepseek-v4"),
    ],
)
def test_a_published_config_that_is_not_understood_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], name: str, word: str
) -> None:
    config = data_file("configs", f"{name}.json")

    code = run(["plan", "--config", str(config)])

    assert code == 2
    assert word in capsys.readouterr().err
