"""Several ranks that share the caches of a published family's model equal transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.bt_runner.harness import Traffic, decode
from tests.support.engine_runs import LIMITS, OPTIONS
from tests.support.hf_models import Checkpoint, load, prompts
from tests.support.hf_recording import greedy
from tests.support.thread_ranks import ThreadRank, run_ranks

from bt_runner.engine import Engine
from bt_runner.models.checkpoint import load_weights, read_config
from bt_runner.requests import SamplingParams
from bt_width import ContextParallel

NUM_NEW = 8
FAMILY = "glm_moe_dsa"


def _found_and_wanted(
    checkpoint: Checkpoint, size: int, interleave: int
) -> tuple[list[list[list[int]]], list[list[int]]]:
    directory = checkpoint(FAMILY)
    config = read_config(directory)
    weights = load_weights(directory, config, dtype=torch.float64)
    texts = [list(prompt) for prompt in prompts()]
    traffic = Traffic(texts, [SamplingParams(max_new_tokens=NUM_NEW)] * len(texts))

    def work(ranks: ThreadRank) -> list[list[int]]:
        context = ContextParallel(size=size, rank=ranks.rank, interleave=interleave)
        limits = replace(LIMITS, max_num_batched_tokens=16, context_parallel=context)
        return decode(Engine(config, weights, limits, options=OPTIONS, ranks=ranks), traffic)

    model = load(directory, torch.float64)
    return run_ranks(size, work), [greedy(model, text, NUM_NEW) for text in texts]


def test_two_ranks_equal_generate(checkpoint: Checkpoint) -> None:
    """Prompts in chunks, several requests in a batch."""
    found, wanted = _found_and_wanted(checkpoint, 2, 4)
    assert found == [wanted, wanted]


@pytest.mark.long
@pytest.mark.parametrize("interleave", [1, 2, 8])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_ranks_equals_generate(
    checkpoint: Checkpoint, size: int, interleave: int
) -> None:
    """In runs of any length that divides the blocks."""
    found, wanted = _found_and_wanted(checkpoint, size, interleave)
    assert found == [wanted] * size
