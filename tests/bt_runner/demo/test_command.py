"""``bt-runner demo`` ends, however short its texts are."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bt_runner.__main__ import main
from bt_runner.models.layers.numerics import WORKSPACE_BYTES
from bt_runner.terminal.options import add_demo_options


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_it_ends_where_requests_end_before_the_next_one_arrives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], max_new_tokens: int
) -> None:
    """Arrivals wait for steps, and an engine without requests takes none."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\nthree\n")

    code = main(["demo", "--prompts", str(prompts), "--max-new-tokens", str(max_new_tokens)])

    assert code == 0
    assert f"3 of 3 requests match the dense reference, {3 * max_new_tokens} tokens" in (
        capsys.readouterr().out
    )


def test_the_workspace_is_the_engines_and_its_default_is_told() -> None:
    """Layers work in pieces of it; ``run`` has the same option."""
    parser = argparse.ArgumentParser()
    add_demo_options(parser)
    assert parser.parse_args([]).workspace == WORKSPACE_BYTES
    assert parser.parse_args(["--workspace", "1MiB"]).workspace == 2**20
    assert "(default: 256MiB)" in parser.format_help()


@pytest.mark.parametrize("workspace", ["1", "64KiB"])
def test_tokens_do_not_depend_on_the_workspace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workspace: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one or two words\n")

    code = main(
        ["demo", "--prompts", str(prompts), "--max-new-tokens", "3", "--workspace", workspace]
    )

    assert code == 0
    assert "1 of 1 requests match the dense reference" in capsys.readouterr().out
