"""Sizes that memory cannot hold are refused in one line, before any of it is taken."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from tests.bt_runner.harness import tiny_hybrid, tiny_limits, tiny_weights
from tests.support.model_configs import glm_5_2, write_config

from bt_runner.cli import run
from bt_runner.engine import Engine
from bt_runner.errors import BadInputError
from bt_runner.files import open_file, read_file
from bt_runner.memory import available_bytes, memory_refused, require_memory
from bt_runner.models.config import MambaLayer, ModelConfig
from bt_runner.models.weights import random_weights


@pytest.mark.parametrize(
    "options",
    [
        ["--max-num-seqs", "1000000000"],
        ["--max-model-len", "1000000000000000"],
        ["--max-num-batched-tokens", "1000000000000"],
        ["--blocks", "99999999999999"],
        ["--blocks", "1000000000"],
        ["--speculative-tokens", "1000000000"],
    ],
    ids=" ".join,
)
def test_a_replay_beyond_memory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """With the bytes it would take."""
    trace, config = tmp_path / "trace.csv", write_config(tmp_path, glm_5_2())
    trace.write_text("10,2\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    code = run(["replay", str(trace), "--config", str(config), *options])

    assert code == 2
    assert "bytes are needed" in capsys.readouterr().err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


@pytest.mark.parametrize("num_blocks", [10**8, 99_999_999_999_999])
def test_an_engine_whose_caches_are_beyond_memory_is_refused(num_blocks: int) -> None:
    """The constructor says so, as the command does."""
    with pytest.raises(BadInputError, match="bytes are needed"):
        Engine(tiny_hybrid(), tiny_weights(), tiny_limits(), num_blocks=num_blocks)


def test_weights_beyond_memory_are_refused() -> None:
    """Before the first is drawn."""
    layer = MambaLayer(num_heads=2**20, head_dim=2**10, state_size=16)
    config = ModelConfig(vocab_size=10, hidden_size=2**20, layers=(layer,))

    with pytest.raises(BadInputError, match=r"the weights: .* bytes are needed"):
        random_weights(config, seed=0, dtype=torch.float32)


def test_what_fits_is_not_refused() -> None:
    """And what does not is told with what is free."""
    free = available_bytes("cpu")
    assert free is not None
    require_memory("half of it", free // 2, "cpu")
    with pytest.raises(BadInputError, match=r"all of it twice: .* free: use less"):
        require_memory("all of it twice", 2 * free, "cpu", advice="use less")


def test_an_allocation_that_fails_is_one_line() -> None:
    """Whatever ran out of memory; another error stays what it is."""
    with pytest.raises(BadInputError, match="memory cannot hold this"), memory_refused():
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="size of tensor"), memory_refused():
        torch.ones(2) + torch.ones(3)


@pytest.mark.parametrize("name", ["missing", "a\0b", "n" * 5000])
def test_a_file_that_cannot_be_read_is_named_shortly(tmp_path: Path, name: str) -> None:
    """A NUL, a name of any length: one line of a few hundred characters."""
    with pytest.raises(BadInputError, match="cannot read prompts from ") as refused:
        open_file(tmp_path / name, what="prompts from ")

    assert len(str(refused.value)) < 500
    assert "\0" not in str(refused.value)


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    """By its size."""
    path = tmp_path / "large"
    path.write_bytes(b"x" * 11)

    with pytest.raises(BadInputError, match="it holds 11 bytes, and at most 10 are read"):
        read_file(path, max_bytes=10)
