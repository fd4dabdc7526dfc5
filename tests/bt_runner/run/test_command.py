"""``bt-runner run`` writes what ``generate`` writes, and says clearly what it cannot do."""

from __future__ import annotations

import functools
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.hf_models import FAMILIES, load, tiny_model
from tests.support.hf_recording import greedy
from tests.support.tokenizers import write_byte_tokenizer

from bt_runner.cli import run
from bt_runner.models.caches import CacheOptions
from bt_runner.models.checkpoint import load_tokenizer
from bt_runner.run import command
from bt_width.errors import counted

NUM_NEW = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with a tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    tiny_model("glm_moe_dsa", seed=0, vocab_size=256).save_pretrained(directory)
    write_byte_tokenizer(directory)
    return directory


def _run(directory: Path, *options: str) -> int:
    return run(["run", "--model", str(directory), "--dtype", "float64", *options])


@pytest.mark.parametrize("family", FAMILIES)
def test_text_equals_generate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    """One prompt: standard output holds the continuation and nothing else."""
    tiny_model(family, seed=0, vocab_size=256).save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokens = greedy(load(tmp_path, torch.float64), tokenizer.encode("Grüße"), NUM_NEW)

    code = _run(tmp_path, "--prompt", "Grüße", "--max-new-tokens", str(NUM_NEW))

    captured = capsys.readouterr()
    assert code == 0
    assert captured.out == tokenizer.decode(tokens) + "\n"
    assert captured.err.startswith(f"{NUM_NEW} tokens in")


@pytest.mark.parametrize("drafts", [[], ["--drafts", "3"]], ids=["plain", "drafted"])
def test_several_prompts_come_in_order(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], drafts: list[str]
) -> None:
    """Each continuation stands below its prompt; empty lines are no prompts."""
    texts = ["first", "the second, which is longer", "x"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(texts), encoding="utf-8")
    tokenizer, theirs = load_tokenizer(model), load(model, torch.float64)

    code = _run(model, "--prompts", str(file), "--max-new-tokens", str(NUM_NEW), *drafts)

    expected = [
        f"> {text}\n{tokenizer.decode(greedy(theirs, tokenizer.encode(text), NUM_NEW))}\n"
        for text in texts
    ]
    assert code == 0
    assert capsys.readouterr().out == "".join(expected)


def test_stop_token_ends_a_text(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text ends after the configuration's end-of-text token."""
    tokenizer = load_tokenizer(model)
    tokens = greedy(load(model, torch.float64), tokenizer.encode("abc"), NUM_NEW)
    stop = tokens[3]
    tiny_model("glm_moe_dsa", seed=0, vocab_size=256, eos_token_id=stop).save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)

    _run(tmp_path, "--prompt", "abc", "--max-new-tokens", str(NUM_NEW))

    assert capsys.readouterr().err.startswith(f"{counted(tokens.index(stop) + 1, 'token')} in")


def test_temperature_draws_by_its_seed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal seeds give equal texts, another seed another."""
    texts = []
    for seed in ("1", "1", "2"):
        _run(model, "--prompt", "abc", "--temperature", "1.5", "--seed", seed)
        texts.append(capsys.readouterr().out)

    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "has 0 prompt tokens"),
        (["--prompt", "abc", "--max-new-tokens", "510"], "longer than the model's 512 positions"),
        (["--prompt", "abc", "--max-model-len", "20"], "more than --max-model-len 20"),
        (["--prompt", "abc", "--num-blocks", "1"], "a pool of 1 block has none"),
        (["--prompts", "no-such-file"], "cannot read prompts from no-such-file"),
        (["--prompt", "abc", "--device", "no-such-device"], "device 'no-such-device'"),
        (["--prompt", "abc\udcff"], "character 4 is '\\udcff', half of a pair"),
    ],
)
def test_what_cannot_be_done_is_said(
    model: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """Exit code 2, the reason on standard error, and nothing on standard output."""
    assert _run(model, *options) == 2

    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--prompt", "a", "--prompts", "b"],
        ["--prompt", "a", "--max-new-tokens", "0"],
        ["--prompt", "a", "--temperature", "-1"],
        ["--prompt", "a", "--temperature", "nan"],
        ["--prompt", "a", "--drafts", "0"],
    ],
    ids=lambda options: " ".join(options) or "no-prompt",
)
def test_options_that_make_no_sense_are_refused(model: Path, options: list[str]) -> None:
    """They end with exit code 2 before anything is read."""
    with pytest.raises(SystemExit) as refused:
        _run(model, *options)

    assert refused.value.code == 2


def test_empty_file_of_prompts_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of empty lines holds no prompt."""
    file = tmp_path / "empty.txt"
    file.write_text("\n \n", encoding="utf-8")

    assert _run(model, "--prompts", str(file)) == 2
    assert "holds no prompt" in capsys.readouterr().err


def test_file_of_prompts_in_another_encoding_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt is text, and the file is read as UTF-8."""
    file = tmp_path / "latin1.txt"
    file.write_bytes("Grüße\n".encode("latin-1"))

    assert _run(model, "--prompts", str(file)) == 2
    assert f"cannot read prompts from {file}" in capsys.readouterr().err


def test_foreign_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer with more tokens than the model's vocabulary does not belong to it."""
    tiny_model("mamba2", seed=0, vocab_size=20).save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)

    assert _run(tmp_path, "--prompt", "abc") == 2
    assert "the model knows 20" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [(2**22 + 1, "line 1 of .* has 4,194,305 bytes"), (100 * 10**6, "it holds 100,000,000 bytes")],
    ids=["a-line", "the-file"],
)
def test_prompts_of_any_size_are_refused_before_they_are_tokenized(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_bytes: int, message: str
) -> None:
    """A line of megabytes takes gigabytes to tokenize, and is longer than any context."""
    file = tmp_path / "large.txt"
    with file.open("wb") as writer:
        writer.truncate(num_bytes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert _run(model, "--prompts", str(file)) == 2

    assert re.search(message, capsys.readouterr().err)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.mark.parametrize("name", ["prompts.txt", "tokenizer.json", "model.safetensors"])
def test_a_fifo_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Reading does not wait for its writer."""
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    (directory / "prompts.txt").write_text("abc\n")
    (directory / name).unlink()
    os.mkfifo(directory / name)

    assert _run(directory, "--prompts", str(directory / "prompts.txt")) == 2
    assert "it is not a regular file" in capsys.readouterr().err


def test_damaged_weights_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN would write a text that means nothing, and end with 0."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")

    assert _run(tmp_path, "--prompt", "abc") == 2
    assert re.search("model.norm.weight in .* holds NaN", capsys.readouterr().err)


def test_a_model_that_caches_no_prefix_says_so_at_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One state a request: with it nothing of a beginning is kept."""
    tiny_model("mamba2", seed=0, vocab_size=256).save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)
    one_state = functools.partial(CacheOptions, mamba_mode="none", num_speculative_blocks=0)
    monkeypatch.setattr(command, "CacheOptions", lambda **_: one_state())

    assert _run(tmp_path, "--prompt", "hello", "--max-new-tokens", "2") == 0

    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("no prefix is cached: group ")
    assert told[1].startswith("2 tokens in")
