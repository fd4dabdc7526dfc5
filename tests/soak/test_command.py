"""A soak ends with 0 where nothing was found, and says how to see a finding again."""

from __future__ import annotations

import re
import time

import pytest
from tests.simulator.scenario import SMALL
from tests.simulator.simulator import Simulator
from tests.soak import command
from tests.soak.command import main as run
from tests.soak.resident import ResidentMemory

from bt_runner.errors import VerificationError

SHORT = ["--minutes", "0.01", "--steps", "8", "--max-growth", "1000"]


@pytest.fixture(autouse=True)
def small_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is cheap."""
    monkeypatch.setattr(command, "LARGE", SMALL)


def test_a_sound_soak_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(SHORT)

    text = capsys.readouterr().out
    assert code == 0
    assert re.search(r"^findings     0$", text, re.MULTILINE)
    assert re.search(r"^lost blocks  0$", text, re.MULTILINE)
    assert re.search(r"^memory       [+-]\d+\.\d\d % after the warm-up$", text, re.MULTILINE)


def test_it_ends_when_its_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is left of a scenario's steps or of its requests."""
    began = time.monotonic()

    code = run(["--minutes", "0.01", "--steps", "1000000", "--max-growth", "1000"])

    assert code == 0
    assert re.search(r"^lost blocks  0$", capsys.readouterr().out, re.MULTILINE)
    assert time.monotonic() - began < 30


def test_a_line_a_minute_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_LINE_SECONDS", 0.0)

    run(SHORT)

    line = capsys.readouterr().out.splitlines()[0]
    assert re.match(r"0 min  scenarios 3  steps \d+ .* findings 0  resident [\d.]+ MiB$", line)


def test_a_finding_ends_with_1_and_names_its_scenario_and_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_loop(self: Simulator, num_steps: int, until: float) -> None:
        self.loop.num_steps = 8
        raise VerificationError("something is wrong")

    monkeypatch.setattr(Simulator, "run", run_loop)

    code = run([*SHORT, "--seed", "5", "--first-scenario", "17"])

    text = capsys.readouterr().out
    assert code == 1
    assert "scenario 17 of seed 5, step 8: something is wrong" in text
    assert "the lasting scenario of seed 5, step 8: something is wrong" in text
    assert "the lasting scenario with shared blocks of seed 5, step 8: something" in text


def test_a_soak_that_finds_too_much_stops(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_loop(self: Simulator, num_steps: int, until: float) -> None:
        raise VerificationError("something is wrong")

    monkeypatch.setattr(Simulator, "run", run_loop)

    assert run(["--minutes", "600", "--steps", "8"]) == 1
    assert "findings     14" in capsys.readouterr().out


def test_growth_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResidentMemory, "growth_percent", 2.5)

    code = run(["--minutes", "0.0001", "--steps", "3"])

    assert code == 1
    assert "memory       +2.50 % after the warm-up" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--minutes", "--steps", "--first-scenario", "--max-growth"])
def test_an_option_out_of_range_is_bad_input(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run([option, "0"])
    assert end.value.code == 2
    assert f"argument {option}: must be" in capsys.readouterr().err
