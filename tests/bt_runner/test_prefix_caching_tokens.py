"""Every token with prefix caching is the one without: models, drafts, ranks, preemption."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from tests.bt_runner.harness import (
    VOCAB,
    SpoiledDrafter,
    Traffic,
    decode,
    tiny_hybrid,
    tiny_limits,
    tiny_options,
    tiny_weights,
)
from tests.support.engine_runs import LIMITS, OPTIONS
from tests.support.hf_models import FAMILIES, SEEDS, tiny_model
from tests.support.thread_ranks import ThreadRank, run_ranks

from bt_runner.engine import Engine
from bt_runner.models.caches import CacheOptions
from bt_runner.models.checkpoint import load_weights, read_config
from bt_runner.models.config import ModelConfig
from bt_runner.models.weights import Weights
from bt_runner.requests import SamplingParams
from bt_width import ContextParallel, ServingLimits

# around the ends of blocks, windows and chunks
LENGTHS = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 25, 32, 33, 40)
NUM_SHORT, NUM_LONG = 30, 1_000


@dataclass(frozen=True)
class _Conversation:
    """Two turns: requests that begin alike, then requests that begin with those and the answers."""

    first: Traffic
    second: Traffic
    wanted: list[list[list[int]]]


def _traffic(draw: random.Random, prompts: list[list[int]]) -> Traffic:
    return Traffic(
        prompts,
        [SamplingParams(max_new_tokens=draw.randint(1, 14)) for _ in prompts],
        [draw.randint(0, 8) for _ in prompts],
    )


def _converse(draw: random.Random, plain: Engine, vocab_size: int) -> _Conversation:
    """Draw a conversation, and decode it without caching."""
    text = [draw.randrange(vocab_size) for _ in range(48)]

    def some(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    first = _traffic(
        draw,
        [text[: draw.choice(LENGTHS)] + some(draw.choice([0, 1, 5])) for _ in range(4)],
    )
    answers = decode(plain, first)
    turns = []
    for prompt, answer in zip(first.prompts, answers, strict=True):
        whole = prompt + answer
        shared = draw.choice([len(whole), len(whole), draw.randint(1, len(whole))])
        turns.append(whole[:shared] + some(draw.choice([0, 1, 6])))
    second = _traffic(draw, turns)
    return _Conversation(first, second, [answers, decode(plain, second)])


def _replay(engine: Engine, conversation: _Conversation) -> None:
    found = [decode(engine, turn) for turn in (conversation.first, conversation.second)]
    assert found == conversation.wanted


@cache
def _scenario(seed: int) -> tuple[int, int]:
    """Run a random scenario; return the tokens that were hit and the preemptions."""
    draw = random.Random(seed)
    num_drafts = draw.choice([0, 0, 1, 3])
    limits = tiny_limits(
        max_num_reqs=draw.randint(1, 4),
        max_num_batched_tokens=draw.choice([num_drafts + 5, 16, 40]),
        num_speculative_tokens=num_drafts,
    )
    options = tiny_options(
        attention_block_size=draw.choice([4, 8]),
        sparse_block_size=draw.choice([4, 8, 12]),
        mamba_block_size=draw.choice([4, 8, 12]),
        mamba_mode="align",
        num_speculative_blocks=num_drafts,
    )
    conversation = _converse(
        draw, _engine(tiny_limits(), tiny_options(), prefix_caching=False), VOCAB
    )
    drafter = None
    if num_drafts:
        both = Traffic(
            conversation.first.prompts + conversation.second.prompts,
            conversation.first.params + conversation.second.params,
        )
        answers = [answer for turn in conversation.wanted for answer in turn]
        drafter = SpoiledDrafter(both, answers, draw.choice([0.3, 0.8, 1.0]))
    room = draw.choice([None, 0, 2])
    engine = _engine(limits, options, drafter=drafter, max_steps_in_flight=draw.choice([1, 2]))
    if room is not None:
        longest = max(
            len(prompt) + params.max_new_tokens
            for turn in (conversation.first, conversation.second)
            for prompt, params in zip(turn.prompts, turn.params, strict=True)
        )
        num_blocks = [
            1
            + room
            + min(
                layout.num_blocks(longest),
                layout.max_resident_blocks(limits.max_num_batched_tokens),
            )
            for layout in engine.layouts
        ]
        engine = _engine(limits, options, drafter=drafter, num_blocks=num_blocks)
    _replay(engine, conversation)
    return engine.prefixes.hit_tokens, engine.prefixes.rehit_tokens


def _engine(limits: ServingLimits, options: CacheOptions, **others: object) -> Engine:
    return Engine(
        tiny_hybrid(),
        tiny_weights(),
        limits,
        options=options,
        **others,  # type: ignore[arg-type]  # tests name real arguments
    )


@pytest.mark.parametrize("seed", range(NUM_SHORT))
def test_a_conversation_gives_the_tokens_it_gives_without_caching(seed: int) -> None:
    """The built-in hybrid, with shared beginnings of every length around its blocks."""
    _scenario(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_SHORT, NUM_LONG, 20))
def test_twenty_more_conversations_give_the_tokens_they_give_without_caching(seed: int) -> None:
    """With those above 1,000 in all."""
    for each in range(seed, seed + 20):
        _scenario(each)


def test_the_conversations_hit() -> None:
    """A scenario in which nothing is shared would prove nothing."""
    hits = [_scenario(seed) for seed in range(4)]
    assert sum(hit > 0 for hit, _ in hits) >= 2


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelConfig, Weights]:
    """A random checkpoint of a published family."""
    directory = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param, seed=SEEDS[request.param]).save_pretrained(directory)
    config = read_config(directory)
    return config, load_weights(directory, config, dtype=torch.float64)


def test_a_checkpoint_gives_the_tokens_it_gives_without_caching(
    family: tuple[ModelConfig, Weights],
) -> None:
    """All families that can be loaded; Mamba2 keeps states at block ends."""
    config, weights = family
    options = replace(OPTIONS, mamba_mode="align", mamba_block_size=8)
    limits = replace(LIMITS, max_num_batched_tokens=24)
    conversation = _converse(
        random.Random(0),
        Engine(config, weights, limits, options=options, prefix_caching=False),
        config.vocab_size,
    )

    engine = Engine(config, weights, limits, options=options, sanitizes=True)
    _replay(engine, conversation)

    assert engine.prefixes.hit_tokens > 0


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hit_alike_and_give_the_tokens_of_one(size: int) -> None:
    """Each looks in its own pool, and finds what the others find."""
    options = tiny_options(mamba_mode="align")
    conversation = _converse(
        random.Random(size), _engine(tiny_limits(), options, prefix_caching=False), VOCAB
    )

    def work(ranks: ThreadRank) -> int:
        context = ContextParallel(size=size, rank=ranks.rank, interleave=1)
        engine = _engine(tiny_limits(context_parallel=context), options, ranks=ranks)
        _replay(engine, conversation)
        return engine.prefixes.hit_tokens

    hits = run_ranks(size, work)

    assert len(set(hits)) == 1
    assert hits[0] > 0


def test_a_preempted_request_finds_its_own_blocks() -> None:
    """What it computed before is still there where the room was not needed.

    The tokens that it is spared are not counted as shared between requests.
    """
    options = tiny_options(mamba_mode="align")
    limits = tiny_limits(max_num_reqs=3)
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCAB) for _ in range(33)] for _ in range(3)]
    traffic = Traffic(prompts, [SamplingParams(max_new_tokens=24)] * 3)
    wanted = decode(_engine(limits, options, prefix_caching=False), traffic)

    engine = _engine(limits, options, num_blocks=[34, 18, 40])

    assert decode(engine, traffic) == wanted
    assert engine.prefixes.hit_tokens == 0
    assert engine.prefixes.rehit_tokens > 0


def test_a_model_with_one_state_a_request_says_that_it_caches_nothing() -> None:
    """Its state is written on and on, so there is nothing to share."""
    engine = _engine(tiny_limits(), tiny_options(mamba_mode="none"))
    assert engine.prefixes.reason_for_none is not None
    assert 'Mamba mode "none"' in engine.prefixes.reason_for_none
