"""``bt-runner replay`` runs a trace to its summary, and ends with 1 or 2 where it must."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support.model_configs import Config, data_file, glm_5_2, nemotron_h_8b, write_config
from tests.support.replays import own_trace, share_too_much

from bt_runner.cli import run

GLM = ["--max-model-len", "350000", "--dcp", "2", "--speculative-tokens", "3"]
SMALL = ["--max-num-seqs", "8", "--max-num-batched-tokens", "1024", "--verify-every", "5"]


def _mooncake(folder: Path, num_requests: int = 12) -> Path:
    path = folder / "trace.jsonl"
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
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _plain(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_json_holds_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, config = _mooncake(tmp_path), write_config(tmp_path, glm_5_2())

    code = run(["replay", str(trace), "--config", str(config), *GLM, *SMALL, "--json"])

    record = json.loads(capsys.readouterr().out)
    assert code == 0
    assert record["num_requests"] == 12
    assert record["num_checked_steps"] == -(-record["num_steps"] // 5)
    # one copy and one launch for all groups, however many there are
    assert (record["copies_per_step"], record["launches_per_step"]) == (1.0, 1.0)


def test_the_summary_is_text_by_default_and_nothing_else_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, config = _mooncake(tmp_path), write_config(tmp_path, glm_5_2())

    code = run(["replay", str(trace), "--config", str(config), *GLM, *SMALL])

    captured = capsys.readouterr()
    assert code == 0
    assert "12 ended, 0 refused" in captured.out
    assert "no difference" in captured.out
    assert captured.err == ""


def test_at_the_traces_pace_it_ends_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, config = _mooncake(tmp_path), write_config(tmp_path, glm_5_2())
    paced = ["--arrivals", "trace", "--step-ms", "5"]

    code = run(["replay", str(trace), "--config", str(config), *GLM, *SMALL, *paced])

    assert code == 0
    assert "12 ended" in capsys.readouterr().out


def test_only_as_many_requests_as_asked_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, config = _mooncake(tmp_path), write_config(tmp_path, glm_5_2())

    run(["replay", str(trace), "--config", str(config), *GLM, *SMALL, "--max-requests", "3"])

    assert "3 ended" in capsys.readouterr().out


def test_a_malformed_line_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = _plain(tmp_path, "100,5\nmany,5\n200,3\n")
    config = write_config(tmp_path, glm_5_2())

    code = run(["replay", str(trace), "--config", str(config), *GLM, *SMALL])

    captured = capsys.readouterr()
    assert code == 0
    assert "2 ended" in captured.out
    assert "line 2 is left out: prompt tokens" in captured.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("100,5\nmany,5\n", "line 2: prompt tokens", id="malformed"),
        pytest.param("100,5\n400000,5\n", "line 2: .*--max-model-len", id="too-long"),
    ],
)
def test_strict_ends_at_a_line_that_would_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    trace, config = _plain(tmp_path, text), write_config(tmp_path, glm_5_2())

    code = run(["replay", str(trace), "--config", str(config), *GLM, *SMALL, "--strict"])

    assert code == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_difference_ends_with_1_and_names_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    share_too_much(monkeypatch)
    trace, config = _mooncake(tmp_path, 30), write_config(tmp_path, glm_5_2())

    code = run(["replay", str(trace), "--config", str(config), *GLM, *SMALL])

    assert code == 1
    assert "group mla" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(["--blocks", "5", "6"], "--blocks", id="blocks-per-group"),
        pytest.param(["--blocks", "1"], "pool of 1", id="no-block"),
        pytest.param(["--device", "nowhere"], "nowhere", id="device"),
    ],
)
def test_an_option_that_cannot_be_used_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    trace, config = _mooncake(tmp_path), write_config(tmp_path, glm_5_2())

    code = run(["replay", str(trace), "--config", str(config), *GLM, *SMALL, *options])

    assert code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--acceptance", "1.5"),
        ("--acceptance", "most"),
        ("--verify-every", "0"),
        ("--max-requests", "-1"),
        ("--step-ms", "nan"),
        ("--blocks", "few"),
    ],
)
def test_an_option_out_of_range_ends_with_2_and_is_named(
    capsys: pytest.CaptureFixture[str], option: str, text: str
) -> None:
    with pytest.raises(SystemExit) as end:
        run(["replay", "trace.csv", "--config", "config.json", option, text])

    assert end.value.code == 2
    assert re.search(rf"argument {option}: must .*not '{text}'", capsys.readouterr().err)


def test_every_group_may_have_a_pool_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = _plain(tmp_path, "100,5\n200,3\n")
    config = write_config(tmp_path, nemotron_h_8b())

    code = run(
        ["replay", str(trace), "--config", str(config), *SMALL, "--blocks", "9", "4", "--json"]
    )

    groups = json.loads(capsys.readouterr().out)["groups"]
    assert code == 0
    assert [group["pool_blocks"] for group in groups] == [9, 4]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("AzureLLMInferenceTrace_conv.csv", id="azure-conversations"),
        pytest.param("mooncake_conversation_trace.jsonl", id="mooncake-conversations"),
    ],
)
def test_three_hundred_real_requests_are_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    trace, config = data_file("traces", name), write_config(tmp_path, glm_5_2())
    options = [*GLM, "--max-requests", "300", "--json", "--strict"]

    code = run(["replay", str(trace), "--config", str(config), *options])

    record = json.loads(capsys.readouterr().out)
    assert code == 0
    assert record["num_requests"] == 300
    assert record["num_checked_steps"] >= 3


def test_small_hash_ids_are_not_taken_for_large_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """128 ids of 2,048 tokens name 16 each, so that four equal ones are 64 shared tokens."""
    lines = [
        {
            "input_length": 2048,
            "output_length": 2,
            "hash_ids": [1, 2, 3, 4, *range(1000 * place, 1000 * place + 124)],
        }
        for place in range(1, 21)
    ]
    trace = _plain(tmp_path, "\n".join(map(json.dumps, lines)))
    config = write_config(tmp_path, glm_5_2())
    options = ["--max-model-len", "4096", "--block-size", "64", *SMALL, "--json"]

    code = run(["replay", str(trace), "--config", str(config), *options])

    assert code == 0
    assert 0 < json.loads(capsys.readouterr().out)["hit_tokens"] <= 1_216


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        pytest.param(
            glm_5_2(),
            ["--block-size", "512", "--dcp", "8"],
            "which are 4,096 tokens over all ranks, and no two prompts have more than their first "
            "1,024 in common",
            id="blocks-longer-than-what-is-common",
        ),
        pytest.param(
            nemotron_h_8b(), [], "group 'mamba' keeps one state a request", id="one-state-a-request"
        ),
        pytest.param(glm_5_2(), ["--block-size", "512", "--dcp", "2"], "", id="blocks-that-fit"),
        pytest.param(
            nemotron_h_8b(),
            ["--block-size", "48", "--mamba-mode", "align", "--mamba-block-size", "512"],
            "which are 1,536 tokens",
            id="two-groups-whose-blocks-seldom-end-together",
        ),
    ],
)
def test_blocks_that_the_trace_can_never_hit_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: Config,
    options: list[str],
    message: str,
) -> None:
    """Two prompts have 1,024 tokens in common; nothing is shared in silence."""
    line = '{"input_length": 5000, "output_length": 2, "hash_ids": [1, 2, %s]}'
    lines = [line % ", ".join(map(str, range(at, at + 8))) for at in (100, 200)]
    trace, path = _plain(tmp_path, "\n".join(lines)), write_config(tmp_path, config)
    limits = ["--max-model-len", "8192", "--max-num-seqs", "1", "--max-num-batched-tokens", "4096"]

    code = run(["replay", str(trace), "--config", str(path), *limits, *options, "--json"])

    said = capsys.readouterr()
    assert code == 0
    assert message in said.err
    assert ("no prompt token is shared" in said.err) == bool(message)
    assert (json.loads(said.out)["hit_tokens"] == 0) == bool(message)


def test_hash_ids_that_contradict_the_option_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = _plain(tmp_path, '{"input_length": 32, "output_length": 1, "hash_ids": [1, 2]}')
    config = write_config(tmp_path, glm_5_2())

    code = run(["replay", str(trace), "--config", str(config), *SMALL, "--hash-tokens", "512"])

    assert code == 2
    assert "line 1 has 2 hash ids for 32 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param('{"model_type": "x"}', "line 1: input_length must be", id="a-config"),
        pytest.param("0,1\n0,2\n", "of 2; the first: line 1: prompt tokens must", id="zeros"),
        pytest.param("9000000,1\n", "could run, of 1; the first: line 1", id="too-long"),
        pytest.param("1000000000,1\n", "could run, of 1; the first: line 1", id="billion"),
        pytest.param("1" + "0" * 30 + ",1\n", "more than a text can have", id="ten-to-the-30"),
    ],
)
def test_a_run_without_a_request_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    """Nothing was checked, so nothing is well; no tokens are made for what cannot run."""
    trace, config = _plain(tmp_path, text), write_config(tmp_path, glm_5_2())

    code = run(["replay", str(trace), "--config", str(config), *SMALL])

    assert code == 2
    assert message in capsys.readouterr().err
