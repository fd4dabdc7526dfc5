"""``bt-width plan``: what a server's tables will be, told before it is started."""

import io
import json
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.model_configs import glm_5_2, write_config

import bt_width
from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    ContextParallel,
    MambaSpec,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
    _command,
    index_buffer_bytes,
    table_bytes,
)
from bt_width.__main__ import main


class Done(NamedTuple):
    """How a command ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str, folder: Path | None = None) -> Done:
    """The command as ``python -m bt_width`` calls it."""
    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        chdir(folder or Path.cwd()),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("COLUMNS", "100")
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def planned(*arguments: str) -> dict[str, Any]:
    """What ``--json`` prints."""
    done = run("plan", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_the_table_has_one_row_per_group() -> None:
    done = run(
        "plan",
        *("--group", "attention:64", "--group", "mamba:640:align:3", "--group", "ring:4"),
        *("--group", "window:16:4096", "--max-model-len", "350000", "--max-num-seqs", "256"),
    )

    header, *rows = [line.split() for line in done.stdout.replace(",", "").splitlines()]
    assert done.returncode == 0
    assert done.stderr == ""
    assert " ".join(header) == ("kind block kernel block blocks width tokens/row table bytes")
    assert rows == [
        ["attention", "64", "64", "5469", "5470", "350080", "5601280"],
        ["mamba", "640", "640", "550", "550", "-", "563200"],
        ["ring", "4", "4", "1", "1", "2147483648", "1024"],
        ["window", "16", "16", "21875", "21880", "350080", "22405120"],
    ]


def test_explain_says_how_each_width_came_about() -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/46074"""
    done = run("plan", "--group", "attention:64", "--max-model-len", "350000", "--explain")

    assert done.returncode == 0
    assert (
        "max_model_len 350000 / (block 64 x 1 shard) = 5469 blocks, rounded up to 5470 so that "
        "a row spans a multiple of 128 tokens, x 1 kernel block = 5470 columns"
    ) in done.stdout


def test_json_says_everything_and_the_layout_comes_back() -> None:
    report = planned(
        *("--group", "attention:64:kernel=16", "--group", "mamba:640:align:3"),
        *("--max-model-len", "5000", "--dcp", "2", "--interleave", "64"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "48"),
        *("--speculative-tokens", "3", "--lookahead-tokens", "7"),
    )

    limits = ServingLimits(
        max_model_len=5000,
        max_num_reqs=8,
        max_num_batched_tokens=48,
        num_speculative_tokens=3,
        lookahead_tokens=7,
        context_parallel=ContextParallel(size=2, interleave=64),
    )
    layouts = [
        BlockTableLayout.plan(AttentionSpec(block_size=64), limits, 16),
        BlockTableLayout.plan(
            MambaSpec(block_size=640, mode="align", num_speculative_blocks=3), limits
        ),
    ]
    assert report.keys() == {"groups", "table_bytes"}
    assert report["table_bytes"] == sum(map(table_bytes, layouts))
    for kind, group, layout in zip(("attention", "mamba"), report["groups"], layouts, strict=True):
        assert BlockTableLayout.from_json(json.dumps(group.pop("layout"))) == layout
        name = "attention:64:kernel=16" if kind == "attention" else "mamba:640:align:3"
        assert group == {
            "name": name,
            "kind": kind,
            "block_size": layout.block_size,
            "kernel_block_size": layout.kernel_block_size,
            "blocks_per_request": layout.max_num_blocks,
            "width": layout.width,
            "addressable_tokens": 5120 if kind == "attention" else None,
            "table_bytes": table_bytes(layout),
            "index_buffer_bytes": index_buffer_bytes(layout),
            "explain": layout.explain(),
        }


@pytest.mark.parametrize(
    ("group", "spec", "kernel_block_size"),
    [
        ("attention:64", AttentionSpec(block_size=64), 64),
        ("attention:64:kernel=16", AttentionSpec(block_size=64), 16),
        ("attention:64:align=none", AttentionSpec(block_size=64, token_alignment=None), 64),
        ("attention:64:align=256", AttentionSpec(block_size=64, token_alignment=256), 64),
        ("attention:64:states=4", AttentionSpec(block_size=64, tokens_per_state=4), 64),
        ("attention:64:replicated", AttentionSpec(block_size=64, sharded=False), 64),
        (
            "attention:64:replicated:states=4:kernel=32:align=none",
            AttentionSpec(block_size=64, sharded=False, tokens_per_state=4, token_alignment=None),
            32,
        ),
        ("window:16:4096", SlidingWindowSpec(block_size=16, window=4096), 16),
        (
            "window:16:4096:kernel=8:align=256",
            SlidingWindowSpec(block_size=16, window=4096, token_alignment=256),
            8,
        ),
        ("mamba:640", MambaSpec(block_size=640), 640),
        ("mamba:640:none", MambaSpec(block_size=640), 640),
        ("mamba:640:none:2", MambaSpec(block_size=640, num_speculative_blocks=2), 640),
        ("mamba:640:align", MambaSpec(block_size=640, mode="align"), 640),
        (
            "mamba:640:align:3",
            MambaSpec(block_size=640, mode="align", num_speculative_blocks=3),
            640,
        ),
        ("ring:4", RingSpec(block_size=4), 4),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_how_a_group_is_said(group: str, spec: CacheSpec, kernel_block_size: int) -> None:
    (found,) = planned("--group", group, "--max-model-len", "1000")["groups"]

    layout = BlockTableLayout.from_json(json.dumps(found["layout"]))
    assert layout.spec == spec
    assert layout.kernel_block_size == kernel_block_size


@pytest.mark.parametrize(
    "group",
    [
        "",
        ":64",
        "attention",
        "attention:",
        "attention:many",
        "attention:0",
        "attention:-64",
        "attention:64.0",
        "attention:64:kernel=48",
        "attention:64:kernel=",
        "attention:64:kernel=16:kernel=32",
        "attention:64:states=3",
        "attention:64:align=0",
        "attention:64:colour=red",
        "attention:64:shared",
        "window:16",
        "window:16:0",
        "window:16:64:states=4",
        "mamba:640:all",
        "mamba:640:align:many",
        "mamba:640:align:-1",
        "mamba:640:kernel=64",
        "ring:4:8",
        "cross:64",
        "uniform:64",
    ],
)
def test_a_group_that_cannot_be_is_refused_in_its_words(group: str) -> None:
    """Exit code 2, one line that quotes the group, nothing half-printed, no traceback."""
    done = run("plan", "--group", "ring:4", "--group", group, "--max-model-len", "1000")

    assert done.returncode == 2
    assert done.stdout == ""
    assert group in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "word"),
    [
        pytest.param("", "plan", id="no-command"),
        pytest.param("plam", "plam", id="unknown-command"),
        pytest.param("plan --max-model-len 1000", "--group", id="no-group"),
        pytest.param("plan --group ring:4", "--max-model-len", id="no-length"),
        pytest.param("plan --group ring:4 --max-model-len 0", "--max-model-len", id="no-tokens"),
        pytest.param("plan --group ring:4 --max-model-len long", "long", id="not-a-number"),
        pytest.param("plan --group ring:4 --max-model-len 9 --dcp 0", "--dcp must", id="no-ranks"),
        pytest.param(
            "plan --group attention:64 --max-model-len 9 --dcp 2 --interleave 3",
            "--interleave 3 must",
            id="interleave",
        ),
        pytest.param(
            "plan --group ring:4 --max-model-len 9 --max-num-seqs -1",
            "--max-num-seqs must",
            id="no-requests",
        ),
        pytest.param(
            "plan --group ring:4 --max-model-len 9 --colour", "--colour", id="unknown-option"
        ),
    ],
)
def test_bad_input_ends_with_2_and_its_word(command: str, word: str) -> None:
    done = run(*command.split())

    assert done.returncode == 2
    assert done.stdout == ""
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_more_than_a_gigabyte_is_warned_of() -> None:
    """2^20 columns of 4 bytes for 257 requests; the index buffer has one row fewer.

    Reported as https://github.com/vllm-project/vllm/pull/46514
    """
    arguments = ("--group", "attention:1", "--max-model-len", str(2**20), "--max-num-seqs", "257")

    both = run("plan", *arguments, "--max-num-batched-tokens", "257", "--json")
    table_only = run("plan", *arguments, "--max-num-batched-tokens", "256")

    assert both.returncode == table_only.returncode == 0
    assert json.loads(both.stdout)["table_bytes"] == 257 * 2**22
    assert "attention:1: the table" in both.stderr
    assert "attention:1: the index buffer" in both.stderr
    assert "attention:1: the table" in table_only.stderr
    assert "index buffer" not in table_only.stderr


def test_an_index_buffer_alone_is_warned_of() -> None:
    """Drafts give a request several rows.

    Reported as https://github.com/vllm-project/vllm/pull/46514
    """
    done = run(
        *("plan", "--group", "attention:1", "--max-model-len", str(2**20)),
        *("--max-num-seqs", "200", "--speculative-tokens", "3"),
    )

    assert done.returncode == 0
    assert "index buffer" in done.stderr
    assert "the table" not in done.stderr


def test_a_gigabyte_itself_is_not_warned_of() -> None:
    done = run(
        *("plan", "--group", "attention:1", "--max-model-len", str(2**20)),
        *("--max-num-seqs", "256", "--max-num-batched-tokens", "256"),
    )

    assert done.returncode == 0
    assert done.stderr == ""


def test_help_shows_examples_that_work(tmp_path: Path) -> None:
    write_config(tmp_path, glm_5_2())
    done = run("plan", "--help")

    assert done.returncode == 0
    text = done.stdout.replace("\\\n", " ")
    examples = [line.split()[1:] for line in text.splitlines() if line.startswith("  bt-width ")]
    assert len(examples) >= 2
    for example in examples:
        assert run(*example, folder=tmp_path).returncode == 0


def test_version_is_the_packages() -> None:
    """As a user asks for it: in a process of its own."""
    command = [sys.executable, "-m", "bt_width", "--version"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0
    assert done.stdout.split() == ["bt-width", bt_width.__version__]


def test_a_reader_that_goes_away_gets_no_traceback() -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "bt_width", "plan", "--group", "ring:4", "--max-model-len", "9"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    writer.stdout.close()
    assert writer.stderr is not None

    said = writer.stderr.read()
    writer.stderr.close()

    assert writer.wait(timeout=60) == 141
    assert said == ""


def test_an_interrupt_ends_with_the_code_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(_command, "main", interrupted)

    assert main([]) == 130
