"""The command as a process: what it loads, and how closed pipes, full disks and Ctrl-C end it."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.speed import command_seconds

import bt_runner
from bt_runner.cli import make_parser
from bt_width._command import build_parser

COMMAND = [sys.executable, "-m", "bt_runner"]
PROMPTS = "A line of some length.\nAnother one.\n"


@pytest.fixture
def demo(tmp_path: Path) -> list[str]:
    """A short demo."""
    path = tmp_path / "prompts.txt"
    path.write_text(PROMPTS)
    return [*COMMAND, "demo", "--device", "cpu", "--prompts", str(path), "--max-new-tokens", "9"]


def loaded_by(*arguments: str) -> set[str]:
    """Top-level modules that a command has loaded when it ends."""
    program = (
        "import sys\nfrom bt_runner.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('loaded', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], ["demo", "--help"], ["replay", "--help"], ["--print-completion"]],
    ids=" ".join,
)
def test_help_and_version_load_no_large_library(arguments: list[str]) -> None:
    if arguments == ["--print-completion"]:
        arguments = [*arguments, "bash"]

    assert loaded_by(*arguments).isdisjoint({"torch", "numpy", "rich", "triton"})


def test_the_version_takes_under_a_fifth_of_a_second(tmp_path: Path) -> None:
    """Of processor time, at its best of five."""
    assert command_seconds([*COMMAND, "--version"], tmp_path) < 0.2


def test_every_public_name_is_there_and_listed() -> None:
    for name in bt_runner.__all__:
        assert getattr(bt_runner, name) is not None
        assert name in dir(bt_runner)
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = bt_runner.Motor  # type: ignore[attr-defined]  # what is tested


def actions_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action, bool]]:
    """Every option of a parser and its commands, with its command and whether one has to choose."""
    choices = {
        action
        for group in parser._mutually_exclusive_groups
        if group.required
        for action in group._group_actions
    }
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in dict(action.choices).values():
                yield from actions_of(command)
        elif not isinstance(action, argparse._HelpAction | argparse._VersionAction):
            yield parser.prog, action, action in choices


ACTIONS = [*actions_of(make_parser()), *actions_of(build_parser())]


def name_of(action: argparse.Action) -> str:
    return " ".join(action.option_strings) or action.dest


@pytest.mark.parametrize(
    ("command", "action", "is_choice"),
    ACTIONS,
    ids=[f"{command} {name_of(action)}" for command, action, _ in ACTIONS],
)
def test_every_option_says_what_it_is_its_default_and_its_unit(
    command: str, action: argparse.Action, is_choice: bool
) -> None:
    """A default in words or by the form of help; a unit in the place of the value."""
    assert action.help, f"{command} {name_of(action)} has no help"
    is_asked_for = action.required or is_choice or not action.option_strings
    is_switch = action.nargs == 0
    if not is_asked_for and not is_switch and action.default is None:
        ends_at_once = "print a script" in action.help
        assert "default" in action.help or ends_at_once, f"{name_of(action)}: what is its default?"
    if action.type in (int, float) and "seed" not in action.dest and not action.choices:
        assert action.metavar, f"{name_of(action)}: what is its unit?"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_completion_script_knows_commands_and_options(shell: str) -> None:
    done = subprocess.run(
        [*COMMAND, "--print-completion", shell], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert "replay" in done.stdout
    assert "max-new-tokens" in done.stdout


def test_a_reader_that_goes_away_ends_a_command_in_silence(demo: list[str]) -> None:
    """As it does a tool that SIGPIPE ends; 1 would mean a mismatch."""
    writer = subprocess.Popen(demo, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stderr is not None  # noqa: PT018
    writer.stdout.close()

    said = writer.stderr.read()
    writer.stderr.close()

    assert (writer.wait(timeout=120), said) == (141, "")


def test_a_full_disk_is_one_line(demo: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(demo, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)

    assert done.returncode == 3
    assert done.stderr == f"error: cannot write the output: {os.strerror(errno.ENOSPC)}\n"


def wait_until_torch_loads(process: subprocess.Popen[str]) -> None:
    """Return when the process has mapped torch's library, which is long before it is ready."""
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and "libtorch" not in maps.read_text():
        time.sleep(0.005)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.6])
def test_ctrl_c_in_the_first_seconds_is_quiet(demo: list[str], seconds: float) -> None:
    """While libraries load it ends the process at once, and later it is told in one word."""
    running = subprocess.Popen(
        [*demo, "--max-new-tokens", "2000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until_torch_loads(running)
    time.sleep(seconds)
    running.send_signal(signal.SIGINT)

    _, said = running.communicate(timeout=120)

    assert running.returncode in (-signal.SIGINT, 130)
    assert said in ("", "interrupted\n")


@pytest.mark.parametrize(
    ("command", "module"),
    [
        *((name, "bt_width.terminal") for name in ("demo", "run", "plan", "replay")),
        *((name, "bt_runner.cli") for name in ("demo", "run", "plan", "replay")),
        ("plan", "bt_width.picture"),
        ("demo", "torch"),
        ("run", "bt_runner.engine"),
        ("replay", "bt_tables"),
        ("demo", "rich.progress"),
    ],
)
def test_ctrl_c_within_an_import_is_quiet(command: str, module: str, tmp_path: Path) -> None:
    """Sent by an audit hook when a command loads the module; the arguments need not be good."""
    program = (
        "import os, signal, sys\n"
        "def interrupt(event, details):\n"
        f"    if event == 'import' and details[0] == {module!r}:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.addaudithook(interrupt)\n"
        "from bt_runner.__main__ import main\n"
        "sys.exit(main())"
    )
    missing = str(tmp_path / "missing")
    arguments = {
        "demo": ["--prompts", missing],
        "run": ["--model", missing, "--prompt", "a"],
        "plan": ["--config", missing],
        "replay": [missing, "--config", missing],
    }[command]
    done = subprocess.run(
        [sys.executable, "-c", program, command, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode in (-signal.SIGINT, 130), done.stderr
    assert done.stderr in ("", "interrupted\n")
