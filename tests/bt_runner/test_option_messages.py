"""What commands say of a bad option: its name as it is typed, in one short line."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from tests.support.hf_models import tiny_model
from tests.support.tokenizers import write_byte_tokenizer

from bt_runner.__main__ import main
from bt_runner.cli import make_parser

FIELD = re.compile(r"(?<![-\w./])[a-z]+_[a-z_]+(?![\w/])")
BAD_VALUES = ("0", "-1", "x", "", "1", "1000000000", "9" * 20, "nan", "9" * 5000)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, with a trace and two prompts beside it."""
    directory = tmp_path_factory.mktemp("model")
    tiny_model("glm_moe_dsa", seed=0, vocab_size=256).save_pretrained(directory)
    write_byte_tokenizer(directory)
    (directory / "trace.csv").write_text("10,2\n40,8\n")
    (directory / "prompts.txt").write_text("A line.\nAnother one.\n")
    return directory


def _good_arguments(command: str, checkpoint: Path) -> list[str]:
    config = ["--config", str(checkpoint / "config.json")]
    prompts = ["--device", "cpu", "--max-new-tokens", "1"]
    return {
        "demo": [*prompts, "--no-check", "--prompts", str(checkpoint / "prompts.txt")],
        "run": [*prompts, "--prompt", "abc", "--model", str(checkpoint)],
        "plan": config,
        "replay": [str(checkpoint / "trace.csv"), *config],
    }[command]


def _options(command: str) -> list[str]:
    """The command's options that take a value, without those that name a file to write."""
    commands = next(
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return [
        action.option_strings[-1]
        for action in commands.choices[command]._actions
        if action.option_strings and action.nargs != 0 and action.metavar != "FILE"
    ]


@pytest.mark.parametrize("command", ["demo", "run", "plan", "replay"])
def test_a_bad_value_ends_in_one_short_line_that_names_no_field(
    command: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option of the command, with each bad value: code 2, or a run where it is a good one."""
    arguments = _good_arguments(command, checkpoint)
    num_refused = 0
    for option in _options(command):
        for value in BAD_VALUES:
            try:
                code = main([command, *arguments, f"{option}={value}"])
            except SystemExit as end:
                code = int(str(end.code))
            said = capsys.readouterr().err.splitlines()
            case = f"{option}={value[:30]}: {said}"[:2000]
            assert code in (0, 2), case
            if code == 2:
                num_refused += 1
                errors = [line for line in said if line.startswith("error: ")]
                assert len(errors) == 1, case
                assert len(errors[0]) < 600, case
                assert not FIELD.search(re.sub(r"'.*?'|/\S+", "", errors[0])), case
    assert num_refused > 20


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("demo", ["--num-blocks", "1000000000"], "make --num-blocks, --max-num-seqs or"),
        ("run", ["--max-model-len", "5000"], "512 positions: lower --max-model-len"),
        ("plan", ["--mamba-block-size", "0"], "--mamba-block-size must be at least 1"),
        ("plan", ["--tp", "0"], "--tp must be at least 1"),
        ("replay", ["--mamba-block-size", "-1"], "--mamba-block-size must be at least 1"),
        ("replay", ["--max-model-len", "1"], "more than --max-model-len 1"),
        ("replay", ["--max-model-len", "3", "--speculative-tokens", "5"], "--max-model-len 3"),
    ],
)
def test_the_option_that_is_wrong_is_named(
    command: str,
    options: list[str],
    words: str,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the one to change."""
    assert main([command, *_good_arguments(command, checkpoint), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_group_says_itself_how_it_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no option of its blocks to be named."""
    assert main(["plan", "--max-model-len", "100", "--group", "attention:0"]) == 2
    assert "replicated]: block_size must be at least 1" in capsys.readouterr().err


def test_an_unknown_option_is_not_echoed_at_length(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor a choice that is none."""
    for argument in (f"--{'x' * 9000}", f"--dtype={'x' * 9000}"):
        with pytest.raises(SystemExit) as end:
            main(["demo", argument])
        assert end.value.code == 2
        assert max(map(len, capsys.readouterr().err.splitlines())) < 600
