"""``bt-width plan --config`` prints a model's plan, and names what it cannot plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support import model_configs
from tests.support.model_configs import Config, data_file, write_config
from tests.support.speed import command_seconds

from bt_width import BlockTableLayout
from bt_width._command import main

pytestmark = pytest.mark.fast

GLM_OPTIONS = ["--max-model-len", "350000", "--dcp", "2", "--speculative-tokens", "3"]


def plan(path: Path, *options: str) -> int:
    """Run the command."""
    return main(["plan", "--config", str(path), *options])


def record(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> dict[str, Any]:
    """What ``--json`` prints."""
    assert plan(path, *options, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_table_shows_every_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = plan(write_config(tmp_path, model_configs.nemotron_h_8b()))

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[0].startswith("nemotron_h, 52 layers, cache in bfloat16, requests of up to 8,192")
    assert [line.split()[0] for line in lines[2:5]] == ["group", "attention", "mamba"]
    assert lines[3].split()[1:] == ["4", "64", "64", "128", "128", "16,384", "-"]
    assert lines[4].split()[1:] == ["24", "64", "64", "1", "1", "-", "102,137,856"]
    assert max(map(len, lines)) <= 80


def test_json_holds_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, write_config(tmp_path, model_configs.glm_5_2()), *GLM_OPTIONS)

    (group,) = found["groups"]
    assert (found["model_type"], found["layers"]) == ("glm_moe_dsa", 78)
    assert (group["blocks_per_request"], group["width"]) == (2735, 2736)
    assert group["table_bytes"] == 256 * 2736 * 4
    assert group["index_buffer_bytes"] == 256 * 4 * 2736 * 4
    assert group["cache_bytes_per_token"] == 89_856 + 21 * 132
    assert [member["layers"] for member in group["members"]] == [78, 21]
    assert BlockTableLayout.from_json(json.dumps(group["layout"])).width == 2736


def test_json_holds_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, model_configs.glm_5_2())

    found = record(capsys, path, "--memory", "80GiB", "--at-len", "128K")

    capacity = found["capacity"]
    assert capacity["pools"][0]["num_blocks"] == 14_489
    assert capacity["requests"] == 14_488 // 2048 == 7
    assert capacity["longest_request"] == 14_488 * 64
    assert capacity["limited_by"].startswith("--memory: ")


def test_auto_plans_the_longest_request_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, model_configs.glm_5_2())

    found = record(capsys, path, "--memory", "20GiB", "--max-model-len", "auto")

    assert found["max_model_len"] == found["capacity"]["longest_request"] == 3621 * 64
    assert found["capacity"]["requests"] == 1
    assert found["groups"][0]["blocks_per_request"] == 3621


def test_auto_is_never_longer_than_the_model_was_made_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, model_configs.nemotron_h_8b())

    found = record(capsys, path, "--memory", "80GiB", "--max-model-len", "auto")

    assert found["max_model_len"] == 8192


def test_kernel_blocks_split_attention_and_never_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, model_configs.nemotron_h_8b())

    groups = record(capsys, path, "--kernel-block-size", "16")["groups"]

    assert [group["kernel_block_size"] for group in groups] == [16, 64]
    assert groups[0]["width"] == 4 * 128


def test_lengths_may_be_written_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, model_configs.glm_5_2())

    assert record(capsys, path, "--max-model-len", "128K")["max_model_len"] == 131_072
    assert record(capsys, path, "--max-model-len", "128k")["max_model_len"] == 128_000
    assert record(capsys, path, "--max-model-len", "1M")["max_model_len"] == 2**20


def test_explain_says_how_each_number_came_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**model_configs.glm_5_2(), "num_nextn_predict_layers": 1}

    plan(write_config(tmp_path, config), "--explain", "--cache-dtype", "fp8_ds_mla")

    out = capsys.readouterr().out
    assert "max_model_len 1048576 / (block 64 x 1 shard) = 16384 blocks" in out
    assert "mla: 78 layers, 656 bytes each, 51,168 per token" in out
    assert "indexer: 21 layers, 132 bytes each, 2,772 per token" in out
    assert "656 bytes for 512 + 64 numbers (FlashMLA" in out
    assert "drafts: off, so 1 draft" in out


def test_a_model_without_a_length_needs_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, model_configs.mamba2())

    assert plan(path) == 2
    assert "--max-model-len" in capsys.readouterr().err
    assert plan(path, "--max-model-len", "4096") == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(["--config", "nowhere.json"], "nowhere.json", id="no-file"),
        pytest.param(["--block-size", "0"], "--block-size must", id="block-size"),
        pytest.param(["--interleave", "5", "--dcp", "2"], "--interleave 5", id="interleave"),
        pytest.param(["--dcp-rank", "1"], "--dcp-rank 1", id="rank"),
        pytest.param(["--max-num-seqs", "0"], "--max-num-seqs must", id="requests"),
        pytest.param(["--max-model-len", "auto"], "needs --memory", id="auto"),
        pytest.param(["--at-len", "1K"], "--at-len needs --memory", id="at-len"),
        pytest.param(["--memory", "1KiB"], "holds no request", id="memory"),
        pytest.param(["--memory", "1GiB", "--at-len", "2M"], "--at-len 2097152", id="too-long"),
        pytest.param(["--cache-dtype", "int3"], "int3", id="dtype"),
        pytest.param(["--cache-dtype", "nvfp4"], "nvfp4", id="format"),
        pytest.param(["--tp", "4", "--dcp", "3"], "--dcp 3 must divide --tp 4", id="dcp"),
        pytest.param(["--tp", "0"], "--tp must", id="tp"),
        pytest.param(["--pp", "0", "--memory", "80GiB"], "--pp must", id="pp"),
        pytest.param(["--kernel-block-size", "48"], "--kernel-block-size 48", id="kernel"),
    ],
)
def test_what_makes_no_plan_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    code = plan(write_config(tmp_path, model_configs.glm_5_2()), *options)

    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert words in captured.err


def test_context_parallel_ranks_must_keep_the_same_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 heads on 8 ranks leave 4 with the same heads; 8 cannot share their tokens."""
    config: Config = {**model_configs.falcon_h1(), "mamba_n_heads": 24}
    path = write_config(tmp_path, config)

    assert plan(path, "--tp", "8", "--dcp", "4") == 0
    assert plan(path, "--tp", "8", "--dcp", "8") == 2
    assert "2 key-value heads on --tp 8 leave 4" in capsys.readouterr().err


TOKEN_BYTES = {
    "Qwen--Qwen3-Next-80B-A3B": [24_576, 0],
    "Qwen--Qwen3.5-397B-A17B": [30_720, 0],
    "ai21labs--Jamba-v0.1": [16_384, 0],
    "deepseek-ai--DeepSeek-R1": [70_272],
    "deepseek-ai--DeepSeek-V2-Lite": [31_104],
    "deepseek-ai--DeepSeek-V3": [70_272],
    "deepseek-ai--DeepSeek-V3.2": [70_272 + 61 * 132],
    "ibm-ai-platform--Bamba-9B": [12_288, 0],
    "moonshotai--Kimi-K3": [27_648, 0],
    "moonshotai--Kimi-Linear-48B-A3B-Instruct": [8_064, 0],
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": [6_144, 0],
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": [8_192, 0],
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": [12_288, 0],
    "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": [6_144, 0],
    "nvidia--Nemotron-H-56B-Base-8K": [40_960, 0],
    "nvidia--Nemotron-H-8B-Base-8K": [16_384, 0],
    "openbmb--MiniCPM3-4B": [35_712],
    "state-spaces--mamba2-2.7b": [0],
    "tiiuae--Falcon-H1-0.5B-Base": [18_432, 0],
    "zai-org--GLM-5": [89_856 + 78 * 132],
    "zai-org--GLM-5.1": [89_856 + 78 * 132],
    "zai-org--GLM-5.2": [89_856 + 21 * 132],
    "zai-org--GLM-5.3": [89_856 + 21 * 132],
}
"""Bytes of a token in each group of a published model, at bfloat16."""

REFUSED = {"deepseek-ai--DeepSeek-V4-Flash": "compress_ratios"}
"""Published models whose caches are not certain, and the key that says why."""


@pytest.mark.parametrize("name", TOKEN_BYTES)
def test_published_configs_are_planned(capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = data_file("configs", f"{name}.json")

    found = record(
        capsys, path, "--model-dtype", "bfloat16", "--max-model-len", "4096", "--memory", "80GiB"
    )

    assert [group["cache_bytes_per_token"] for group in found["groups"]] == TOKEN_BYTES[name]


@pytest.mark.parametrize("name", REFUSED)
def test_published_configs_that_are_not_certain_are_refused(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert plan(data_file("configs", f"{name}.json")) == 2
    assert REFUSED[name] in capsys.readouterr().err


def test_no_published_config_is_left_out() -> None:
    names = {path.stem for path in data_file("configs").glob("*.json")}

    assert names == TOKEN_BYTES.keys() | REFUSED.keys()


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("nvidia--Nemotron-H-8B-Base-8K", 1039),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 2084),
        ("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 4156),
        ("nvidia--Nemotron-H-56B-Base-8K", 4126),
    ],
)
def test_a_layers_page_is_as_large_as_vllms(
    capsys: pytest.CaptureFixture[str], name: str, tokens: int
) -> None:
    """Tokens of attention for which a page takes as many bytes as a page of Mamba."""
    groups = record(capsys, data_file("configs", f"{name}.json"))["groups"]

    token, state = groups[0]["members"][0], groups[1]["members"][0]
    token_bytes = token["cache_bytes_per_token"] // token["layers"]
    state_bytes = (state["recurrent_bytes"] + state["convolution_bytes"]) // state["layers"]
    assert -(-state_bytes // token_bytes) == tokens


def test_super_counts_its_draft_layer_where_drafts_are_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = data_file("configs", "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8.json")

    found = record(capsys, path, "--speculative-tokens", "1")

    assert found["groups"][0]["cache_bytes_per_token"] == 9_216


def test_a_plan_takes_no_torch_and_under_a_fifth_of_a_second(tmp_path: Path) -> None:
    path = write_config(tmp_path, model_configs.glm_5_2())
    arguments = ["plan", "--config", str(path), "--memory", "80GiB"]
    script = (
        "import sys\n"
        "from bt_width._command import main\n"
        f"main({arguments!r})\n"
        "sys.exit('torch' in sys.modules)\n"
    )

    seconds = command_seconds([sys.executable, "-c", script], tmp_path / "compiled")

    # Python's own start included
    assert seconds < 0.2
