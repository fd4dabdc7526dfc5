"""``bt-runner demo`` ends, however short its texts are."""

from __future__ import annotations

from pathlib import Path

import pytest

from bt_runner.__main__ import main


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
