"""Drafts change the number of steps, and no token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.bt_runner.harness import (
    SpoiledDrafter,
    Traffic,
    decode,
    decode_all_densely,
    greedy_traffic,
    tiny_engine,
    tiny_limits,
    tiny_options,
)

from bt_runner.drafters import NGramDrafter
from bt_runner.engine import Engine
from bt_runner.requests import SamplingParams

LENGTHS = (9, 1, 30, 16)


def _engine(
    num_drafts: int, mode: str = "none", *, drafter: SpoiledDrafter | NGramDrafter
) -> Engine:
    return tiny_engine(
        tiny_limits(num_speculative_tokens=num_drafts, max_num_batched_tokens=24),
        tiny_options(mamba_mode=mode, num_speculative_blocks=num_drafts, mamba_block_size=6),
        drafter=drafter,
    )


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5])
def test_greedy_tokens_are_the_same_for_every_number_of_drafts(
    num_drafts: int, is_ragged: bool, mode: str
) -> None:
    """Six in ten drafts are right: rejections fall everywhere, block borders included."""
    traffic = greedy_traffic(num_drafts, LENGTHS, max_new_tokens=14)
    wanted = decode_all_densely(traffic)
    drafter = SpoiledDrafter(traffic, wanted, 0.6, seed=num_drafts, is_ragged=is_ragged)
    engine = _engine(num_drafts, mode, drafter=drafter)
    assert decode(engine, traffic) == wanted


@pytest.mark.parametrize(("acceptance", "num_steps"), [(1.0, 4), (0.0, 12)], ids=["all", "none"])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(
    acceptance: float, num_steps: int
) -> None:
    """One step for the prompt and its token, then four tokens a step or one."""
    traffic = greedy_traffic(6, [8], max_new_tokens=12)
    wanted = decode_all_densely(traffic)
    engine = _engine(3, drafter=SpoiledDrafter(traffic, wanted, acceptance))
    assert decode(engine, traffic) == wanted
    assert engine.num_steps == num_steps


@pytest.mark.parametrize("mode", ["none", "align"])
def test_drafts_and_preemption_together_change_nothing(mode: str) -> None:
    """A request that starts over forgets its drafts and its accepted ones."""
    traffic = greedy_traffic(7, (20, 22, 18), max_new_tokens=18)
    wanted = decode_all_densely(traffic)
    options = tiny_options(mamba_mode=mode, num_speculative_blocks=2, mamba_block_size=4)
    limits = tiny_limits(num_speculative_tokens=2)
    drafter = SpoiledDrafter(traffic, wanted, 0.7, is_ragged=True)
    engine = tiny_engine(limits, options, num_blocks=[1 + 14, 1 + 7, 1 + 9], drafter=drafter)
    assert decode(engine, traffic) == wanted


def test_drawn_tokens_are_the_same_with_drafts() -> None:
    """A draft is kept where it is the token that would have been drawn."""
    traffic = greedy_traffic(8, (9, 12), max_new_tokens=20)
    drawn = Traffic(
        traffic.prompts, [replace(params, temperature=0.2, seed=5) for params in traffic.params]
    )
    wanted = decode(tiny_engine(), drawn)
    assert decode(_engine(3, drafter=NGramDrafter()), drawn) == wanted


def test_the_text_itself_is_a_drafter() -> None:
    """A text that repeats is guessed, and decoded in fewer steps."""
    prompt = [5, 9, 2, 41, 17] * 6
    traffic = Traffic([prompt], [SamplingParams(max_new_tokens=40)])
    plain = tiny_engine()
    wanted = decode(plain, traffic)
    engine = _engine(3, drafter=NGramDrafter())
    assert decode(engine, traffic) == wanted
    assert engine.num_steps < plain.num_steps


def test_a_stop_token_among_drafts_ends_the_request_there() -> None:
    """What was accepted behind it is dropped."""
    traffic = greedy_traffic(9, [8], max_new_tokens=12)
    (free,) = decode_all_densely(traffic)
    stop = next(
        token for index, token in enumerate(free) if index > 1 and token not in free[:index]
    )
    params = replace(traffic.params[0], stop_tokens=frozenset({stop}))
    engine = _engine(5, drafter=SpoiledDrafter(traffic, [free], 1.0))
    outputs = decode(engine, Traffic(traffic.prompts, [params]))
    assert outputs == [free[: free.index(stop) + 1]]
