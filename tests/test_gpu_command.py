"""What ``hatch run gpu`` runs where there is a GPU, and what it does where there is none."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch
from benchmarks import gpu


def _run(monkeypatch: pytest.MonkeyPatch, codes: list[int]) -> tuple[int, list[list[str]]]:
    """Run the command as if there were a device, each part ending with a code of ``codes``."""
    commands: list[list[str]] = []

    def end(command: list[str], *, env: dict[str, str], timeout: int, **_: Any) -> Any:
        assert env["TRITON_INTERPRET"] == "0"
        code = codes[len(commands)]
        commands.append(command[2:])
        if code < 0:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", end)
    return gpu.main(), commands


def test_the_demo_is_checked_with_and_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the tests marked ``cuda`` and the tables' benchmark."""
    code, commands = _run(monkeypatch, [0] * 4)
    assert code == 0
    demos = [command for command in commands if command[0] == "bt_runner"]
    assert demos == [
        ["bt_runner", "demo", "--device", "cuda"],
        ["bt_runner", "demo", "--device", "cuda", "--graphs"],
    ]
    assert ["benchmarks.table_gpu"] in commands
    assert any(command[0] == "pytest" and "cuda" in command for command in commands)


@pytest.mark.parametrize("code", [1, -1], ids=["fails", "hangs"])
@pytest.mark.parametrize("place", range(4))
def test_a_part_that_fails_fails_the_command_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, place: int, code: int
) -> None:
    """Also one that takes too long."""
    codes = [0] * 4
    codes[place] = code
    found, commands = _run(monkeypatch, codes)
    assert found == 1
    assert len(commands) == 4


def test_it_ends_within_five_minutes() -> None:
    """Whatever hangs."""
    assert sum(part.seconds for part in gpu.PARTS) <= 300


def test_without_a_device_it_ends_well_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No figure is made up."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 0
    assert "nothing was run" in capsys.readouterr().out
