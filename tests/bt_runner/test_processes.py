"""Ranks as processes: they decode together, and end together."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bt_runner.errors import BadInputError
from bt_runner.processes import joined_ranks

LOCAL = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
PATIENCE_S = 120


def _start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env=os.environ | LOCAL | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_torchrun_starts_ranks_that_decode_as_one(tmp_path: Path) -> None:
    """The first one prints and checks; one token is shorter than any interleave."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("A\nA line that both ranks keep a part of, in turns of four tokens.\n")
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bt_runner"]
    options = ["--prompts", str(prompts), "--max-new-tokens", "3", "--interleave", "4"]
    out, err = _start([*launcher, "demo", *options]).communicate(timeout=PATIENCE_S)
    assert "bt-runner demo on 2 ranks, cpu, float64" in out, err
    assert out.count("2 of 2 requests match the dense reference, 6 tokens") == 1


REFUSALS = {
    "cannot read prompts from": ["demo", "--prompts", "missing.txt"],
    "bytes are needed, and cpu has": ["demo", "--num-blocks", "1000000000"],
    "cannot read missing": ["run", "--model", "missing", "--prompt", "a"],
    "must be a whole number": ["run", "--model", "missing", "--drafts", "x"],
}


def test_refusals_under_torchrun_are_told_once(tmp_path: Path) -> None:
    """All ranks refuse the same input, and one of them says so: a file, memory, a model, an option.

    One launch tries them in turn, as it takes seconds.
    """
    script = tmp_path / "refusals.py"
    script.write_text(
        "import sys\n"
        "from bt_runner.__main__ import main\n"
        f"codes = [main(options) for options in {list(REFUSALS.values())}]\n"
        "sys.exit(2 if codes == [2] * len(codes) else 1)\n"
    )
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    _, err = _start([*launcher, str(script)]).communicate(timeout=PATIENCE_S)
    assert [err.count(words) for words in REFUSALS] == [1] * len(REFUSALS), err
    assert "exitcode  : 2" in err


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        pytest.param({"WORLD_SIZE": "2"}, "RANK is not set", id="no-rank"),
        pytest.param({"WORLD_SIZE": ""}, "WORLD_SIZE is '', which is not a number", id="empty"),
        pytest.param({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'", id="a-word"),
        pytest.param({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0 and must lie in 1", id="none"),
        pytest.param({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2 and must lie in 0..1", id="past"),
        pytest.param({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_PORT is not set", id="no-port"),
        pytest.param(
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "29500"}, "MASTER_ADDR", id="no-host"
        ),
    ],
)
def test_an_environment_that_describes_no_group_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    """By the variable's name, before torch waits for anybody."""
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInputError, match=re.escape(message)), joined_ranks("cpu"):
        pytest.fail("the ranks came together")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_ends_the_others(killed: int) -> None:
    """With a code that is not zero, and within 30 seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = ["bt_runner", "demo", "--max-new-tokens", "2000", "--no-check"]
    ranks = [_start(command, RANK=str(rank), **together) for rank in range(2)]
    try:
        first_line = ranks[0].stdout.readline() if ranks[0].stdout else ""
        assert "2 ranks" in first_line
        ranks[killed].send_signal(signal.SIGKILL)
        began = time.monotonic()
        _, err = ranks[1 - killed].communicate(timeout=PATIENCE_S)
        assert time.monotonic() - began < 30
        assert ranks[1 - killed].returncode not in (0, None)
        assert f"rank {1 - killed} of 2 lost another one" in err
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
