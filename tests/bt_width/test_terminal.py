"""How commands end and what they print: codes, one error prefix, tables that fit the screen."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bt_width.terminal import (
    CommandParser,
    ExitCode,
    format_table,
    name_options,
    print_warning,
    run_guarded,
)

HEADER = ("group", "layers", "bytes")
ROWS = [("mla", "61 mla + 61 indexer", "12,345,678"), ("mamba", "4", "9")]


def run_program(body: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """A guarded command in a process of its own."""
    program = f"import sys\nfrom bt_width.terminal import *\n{body}\nsys.exit(run_guarded(command))"
    given = {"stdout": subprocess.PIPE, **settings}
    return subprocess.run(  # type: ignore[call-overload,no-any-return]  # settings are subprocess's
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60, **given
    )


def test_a_table_that_fits_is_aligned() -> None:
    assert format_table(HEADER, ROWS, width=80) == (
        "group               layers       bytes\n"
        "mla    61 mla + 61 indexer  12,345,678\n"
        "mamba                    4           9"
    )


def test_a_table_that_is_too_wide_turns_into_lines_and_keeps_every_digit() -> None:
    assert format_table(HEADER, ROWS, width=37) == (
        "mla\n  layers  61 mla + 61 indexer\n  bytes   12,345,678\nmamba\n  layers  4\n  bytes   9"
    )


def test_a_table_may_be_as_wide_as_the_screen() -> None:
    assert format_table(HEADER, ROWS, width=38).startswith("group")


def test_a_table_follows_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")

    assert format_table(HEADER, ROWS).startswith("mla\n")


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("max_num_reqs must be at least 1", "--max-num-seqs must be at least 1"),
        ("context_parallel.size must be at least 1", "--dcp must be at least 1"),
        ("kernel_block_size 3 does not divide", "kernel_block_size 3 does not divide"),
        ("the block_size, and my_block_size", "the --block-size, and my_block_size"),
    ],
)
def test_an_error_names_options_for_fields(message: str, named: str) -> None:
    options = {
        "max_num_reqs": "--max-num-seqs",
        "context_parallel.size": "--dcp",
        "block_size": "--block-size",
    }

    assert name_options(message, options) == named


def test_help_names_the_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser(prog="x")
    parser.add_argument("--a", type=int, default=7, help="tokens")
    parser.add_argument("--b", default=1, help="ranks (default: one)")
    parser.add_argument("--c", action="store_true", help="check")

    parser.print_help()

    text = capsys.readouterr().out
    assert "tokens (default: 7)" in text
    assert "ranks (default: one)\n" in text
    assert "check\n" in text


def test_a_wrong_option_has_the_usage_and_the_one_prefix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        CommandParser(prog="x").parse_args(["--dance"])

    assert end.value.code == 2
    assert capsys.readouterr().err == "usage: x [-h]\nerror: unrecognized arguments: --dance\n"


def test_a_full_disk_is_one_line() -> None:
    """Whether the output is written at once or at the end."""
    with open("/dev/full", "w") as full:
        small = run_program("def command():\n    print('x')\n    return 0", stdout=full)
        large = run_program("def command():\n    print('x' * 10**6)\n    return 0", stdout=full)

    for done in (small, large):
        assert done.returncode == ExitCode.FAILED
        assert done.stderr == f"error: cannot write the output: {os.strerror(errno.ENOSPC)}\n"


def test_help_to_a_full_disk_is_one_line() -> None:
    body = "def command():\n    CommandParser(prog='x').parse_args(['--help'])\n    return 0"
    with open("/dev/full", "w") as full:
        done = run_program(body, stdout=full)

    assert done.returncode == ExitCode.FAILED
    assert done.stderr == f"error: cannot write the output: {os.strerror(errno.ENOSPC)}\n"


def test_a_closed_output_is_no_fault() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m bt_width plan --group ring:4 --max-model-len 9 >&-"],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def command() -> int:
        return len((tmp_path / "nothing").read_text())

    assert run_guarded(command) == ExitCode.FAILED
    assert capsys.readouterr().err == f"error: {tmp_path / 'nothing'}: No such file or directory\n"


def test_no_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise MemoryError

    assert run_guarded(command) == ExitCode.FAILED
    assert capsys.readouterr().err == "error: out of memory\n"


def test_a_bug_is_shown_whole_and_is_no_mismatch(capsys: pytest.CaptureFixture[str]) -> None:
    """A refused connection, which names no file, is one as well."""
    for error in (ZeroDivisionError("seven"), ConnectionRefusedError("seven")):

        def command(error: Exception = error) -> int:
            raise error

        assert run_guarded(command) == ExitCode.FAILED
        said = capsys.readouterr().err
        assert "Traceback" in said
        assert "seven" in said


def test_a_warning_without_a_reader_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, text)

    monkeypatch.setattr(sys, "stderr", Full())

    print_warning("lost")


def test_ctrl_c_while_libraries_load_ends_the_process_in_silence() -> None:
    body = (
        "import os, signal\n"
        "def command():\n"
        "    with quiet_interrupts():\n"
        "        try:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        except BaseException:\n"
        "            print('seen')\n"
        "    return 0"
    )

    done = run_program(body)

    assert done.returncode == -2
    assert (done.stdout, done.stderr) == ("", "")


def test_ctrl_c_is_seen_again_afterwards() -> None:
    body = (
        "import os, signal\n"
        "def command():\n"
        "    with quiet_interrupts():\n"
        "        pass\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return 0"
    )

    done = run_program(body)

    assert (done.returncode, done.stderr) == (130, "interrupted\n")
