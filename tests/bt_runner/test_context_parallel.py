"""Several ranks that share every request's cache give the tokens of one."""

from __future__ import annotations

import pytest
from tests.bt_runner.harness import (
    Traffic,
    decode,
    decode_all_densely,
    greedy_traffic,
    tiny_hybrid,
    tiny_limits,
    tiny_options,
    tiny_weights,
)
from tests.support.thread_ranks import ThreadRank, run_ranks

from bt_runner.drafters import NGramDrafter
from bt_runner.engine import Engine
from bt_runner.errors import BadInputError
from bt_width import ContextParallel


def _engine(ranks: ThreadRank, interleave: int, num_drafts: int = 0, **options: object) -> Engine:
    context = ContextParallel(size=ranks.size, rank=ranks.rank, interleave=interleave)
    num_blocks = options.pop("num_blocks", None)
    return Engine(
        tiny_hybrid(),
        tiny_weights(),
        tiny_limits(num_speculative_tokens=num_drafts, context_parallel=context),
        options=tiny_options(attention_block_size=8, num_speculative_blocks=num_drafts, **options),
        num_blocks=num_blocks,  # type: ignore[arg-type]  # a test's own sizes
        drafter=NGramDrafter(longest=1) if num_drafts else None,
        ranks=ranks,
    )


def _decode(traffic: Traffic, size: int, interleave: int, **options: object) -> list[list[int]]:
    num_drafts = int(str(options.pop("num_drafts", 0)))
    outputs = run_ranks(
        size, lambda ranks: decode(_engine(ranks, interleave, num_drafts, **options), traffic)
    )
    assert all(each == outputs[0] for each in outputs)
    return outputs[0]


@pytest.mark.parametrize(
    ("size", "interleave"), [(2, 1), (3, 8), (4, 4)], ids=["2x1", "3x-a-block", "4x4"]
)
def test_tokens_equal_those_of_one_rank(size: int, interleave: int) -> None:
    """Chunked prompts of many lengths, some shorter than the interleave."""
    traffic = greedy_traffic(21, (1, 2, 30, 17, 5), max_new_tokens=8)
    assert _decode(traffic, size, interleave) == decode_all_densely(traffic)


@pytest.mark.parametrize("mode", ["none", "align"])
def test_drafts_change_nothing_on_several_ranks(mode: str) -> None:
    """Ragged drafts, rejected everywhere."""
    traffic = greedy_traffic(22, (9, 3, 20), max_new_tokens=14)
    found = _decode(traffic, 2, 2, num_drafts=2, mamba_mode=mode)
    assert found == decode_all_densely(traffic)


def test_preemption_changes_nothing_on_several_ranks() -> None:
    """All ranks take the same blocks away."""
    traffic = greedy_traffic(23, (20, 22, 18), max_new_tokens=18)
    found = _decode(traffic, 2, 4, num_blocks=[1 + 4, 1 + 4, 1 + 3])
    assert found == decode_all_densely(traffic)


def test_kernel_blocks_smaller_than_blocks_change_nothing() -> None:
    """Positions are owned in blocks; the kernel block only cuts the result."""
    traffic = greedy_traffic(24, (20, 7), max_new_tokens=6)
    found = _decode(traffic, 2, 8, kernel_block_sizes=(2,))
    assert found == decode_all_densely(traffic)


@pytest.mark.long
@pytest.mark.parametrize("interleave", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_every_split_gives_the_tokens_of_one_rank(
    size: int, interleave: int, num_drafts: int
) -> None:
    """With and without drafts."""
    traffic = greedy_traffic(25 + size, (1, 2, 30, 17, 5, 40), max_new_tokens=12)
    found = _decode(traffic, size, interleave, num_drafts=num_drafts)
    assert found == decode_all_densely(traffic)


def test_limits_of_another_rank_are_refused() -> None:
    """Slots would be those of the other one."""

    def make(ranks: ThreadRank) -> Engine:
        context = ContextParallel(size=2, rank=1 - ranks.rank)
        limits = tiny_limits(context_parallel=context)
        return Engine(tiny_hybrid(), tiny_weights(), limits, options=tiny_options(), ranks=ranks)

    with pytest.raises(BadInputError, match="the limits are those of rank"):
        run_ranks(2, make)


def test_ranks_with_different_plans_refuse_to_run() -> None:
    """Both derivations are told, on every rank."""

    def make(ranks: ThreadRank) -> str:
        context = ContextParallel(size=2, rank=ranks.rank, interleave=1)
        limits = tiny_limits(context_parallel=context, max_model_len=96 + 64 * ranks.rank)
        with pytest.raises(BadInputError, match="the ranks planned different tables") as refusal:
            Engine(tiny_hybrid(), tiny_weights(), limits, options=tiny_options(), ranks=ranks)
        return str(refusal.value)

    for message in run_ranks(2, make):
        assert "rank 0: max_model_len 96" in message
        assert "rank 1: max_model_len 160" in message
