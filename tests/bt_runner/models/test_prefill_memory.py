"""What a prefill takes, measured in processes of their own: it follows neither chunk nor topk."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.prefill_memory import MIB, in_a_process

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's /proc"
)

SIZES = ("--heads", "4", "--latent", "128", "--hidden", "128")
PROMPT = (*SIZES, "--topk", "128", "--prompt", "1024")


def test_peak_memory_does_not_grow_with_the_chunk() -> None:
    """A sixteenth of the steps take no more than a part of what they would without pieces."""
    small, large, endless = (
        in_a_process(*PROMPT, "--chunk", chunk, "--workspace-mib", workspace)
        for chunk, workspace in (("64", "8"), ("1024", "8"), ("1024", "4000"))
    )

    # machines differ in what a process holds beside its tensors: it grew by 7 MiB here, 34 there
    assert large["peak"] - small["peak"] < large["unbounded"] / 5
    assert endless["peak"] > large["unbounded"] / 3


def test_a_context_shorter_than_the_choice_is_read_once() -> None:
    """128 tokens of which 2,048 may be chosen take what 128 of 128 do, not sixteen times that."""
    few, many = (
        in_a_process(*SIZES, "--prompt", "128", "--chunk", "128", "--topk", topk)
        for topk in ("128", "2048")
    )

    assert many["peak"] < 2 * few["peak"] + 8 * MIB
    assert many["seconds"] < 2 * few["seconds"] + 0.2
