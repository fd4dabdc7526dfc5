"""The command line: what it prints, and with which code it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bt_runner
from bt_runner.__main__ import main
from bt_runner.cli import make_parser
from bt_runner.demo import command as demo
from bt_runner.demo.prompts import installed_prompts
from bt_runner.engine import Engine
from bt_tables import StagedBlockTables, StepBatch, StepTables

TEXTS = (
    "Short.\n\nA line of some length, to be read in one step.\nThe last one, which joins late.\n"
)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of three prompts and an empty line."""
    path = tmp_path / "prompts.txt"
    path.write_text(TEXTS)
    return path


def _demo(prompts: Path, *options: str) -> int:
    return main(["demo", "--prompts", str(prompts), "--max-new-tokens", "4", *options])


def test_the_demo_checks_every_request(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Groups, requests, a summary and the verdict; no bar in a pipe."""
    assert _demo(prompts) == 0
    out, err = capsys.readouterr()
    assert "check: 3 of 3 requests match the dense reference, 12 tokens" in out
    for words in ("dense", "sparse", "mamba", "line 1", "line 3", "requests 3", "blocks in use"):
        assert words in out
    assert "decoding" not in out + err


def test_the_check_can_be_skipped(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then nothing is said about it."""
    assert _demo(prompts, "--no-check") == 0
    assert "check:" not in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_is_reported_as_near_ties(
    prompts: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it may decide, a different token is no mismatch."""
    assert _demo(prompts, "--dtype", dtype) == 0
    assert "3 of 3 requests match" in capsys.readouterr().out


def test_a_mismatch_exits_1_and_names_request_step_and_layer(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two columns of the dense group's rows change places."""
    step = StagedBlockTables.step

    def broken(self: StagedBlockTables, batch: StepBatch) -> StepTables:
        tables = step(self, batch)
        swapped = tables.block_tables[0].clone()
        swapped[:, [0, 1]] = swapped[:, [1, 0]]
        return StepTables((swapped, *tables.block_tables[1:]), tables.slot_mappings)

    monkeypatch.setattr(StagedBlockTables, "step", broken)
    assert _demo(prompts) == 1
    out = capsys.readouterr().out
    assert "MISMATCH request-" in out
    assert "first differs in step" in out
    assert "in layer 2" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ["--max-model-len", "20"], "more than --max-model-len 20", id="prompt-too-long"
        ),
        pytest.param(["--num-blocks", "2"], "needs 2 blocks of group 'dense'", id="pool-too-small"),
        pytest.param(["--num-blocks", "1"], "block 0 is reserved", id="empty-pool"),
        pytest.param(["--device", "cuda:99"], "cannot be used", id="no-such-device"),
        pytest.param(["--device", "cpu", "--graphs"], "need a CUDA device", id="graphs-on-a-cpu"),
        pytest.param(["--device", "nonsense"], "cannot be used", id="no-device-at-all"),
    ],
)
def test_bad_input_exits_2_before_a_step(
    prompts: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the numbers, and nothing half-done."""
    monkeypatch.setattr(Engine, "step", lambda _: pytest.fail("a step was computed"))
    assert _demo(prompts, *options) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert message in err
    assert "check:" not in out


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read prompts"), ("\n  \n", "holds no prompt")],
    ids=["missing", "empty"],
)
def test_a_prompts_file_without_prompts_exits_2(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing or empty."""
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_text(content)
    assert _demo(path) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["demo", "--max-new-tokens", "0"], ["demo", "--dtype", "int8"], ["dance"]]
)
def test_a_wrong_command_line_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With the usage."""
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert "usage: bt-runner" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "run", "plan", "replay"])
def test_every_command_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At the end of its help."""
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"example: bt-runner {command}" in capsys.readouterr().out


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The package's own."""
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"bt-runner {bt_runner.__version__}\n"


def test_ctrl_c_ends_without_a_traceback(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the code shells give to an interrupted command."""

    def interrupt(_: Engine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupt)
    assert _demo(prompts) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_built_in_prompts_are_long_and_short_and_join_late() -> None:
    """At least twelve, from one token to two thousand, several while others run."""
    prompts = installed_prompts()
    lengths = sorted(len(prompt.token_ids) for prompt in prompts)
    assert len(prompts) >= 12
    assert (lengths[0], lengths[-1]) == (1, 2_000)
    assert len(prompts) > make_parser().parse_args(["demo"]).max_num_seqs
    assert demo.STEPS_BETWEEN_ARRIVALS > 0


def test_python_m_runs_the_same_command(prompts: Path) -> None:
    """In a process of its own, and a pipe gets no escape codes."""
    command = [sys.executable, "-m", "bt_runner", "demo", "--prompts", str(prompts)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "--max-new-tokens", "2"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "3 of 3 requests match" in ended.stdout
    assert "\x1b" not in ended.stdout
