"""Runs requests through an engine and through the dense reference, for comparison."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from bt_runner.cuda_graphs import GraphOptions, Work
from bt_runner.demo.check import Verdict, check_request
from bt_runner.dense import DenseModel
from bt_runner.drafters import Drafter
from bt_runner.engine import Engine
from bt_runner.models.caches import CacheOptions
from bt_runner.models.config import (
    MLA,
    MLP,
    AttentionLayer,
    MambaLayer,
    ModelConfig,
    SelectAll,
    SelectShared,
    SelectTopK,
    hybrid_config,
)
from bt_runner.models.layers.numerics import Rope
from bt_runner.models.weights import Weights, random_weights
from bt_runner.recorder import Recorder
from bt_runner.requests import SamplingParams
from bt_width import ServingLimits

VOCAB = 61


@cache
def tiny_hybrid() -> ModelConfig:
    """One layer of every kind, and one that shares a choice; five tokens are few to choose."""
    mla = MLA(num_heads=2, q_lora_rank=16, kv_lora_rank=12, nope_dim=8, v_dim=6, rope=Rope(dim=4))
    indexer = SelectTopK(num_heads=16, head_dim=8, topk=5, rope=Rope(dim=4, interleaved=False))
    mlp = MLP(intermediate_size=24)
    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        layers=(
            MambaLayer(num_heads=4, head_dim=4, state_size=6, num_groups=2),
            AttentionLayer(mla=mla, selection=indexer, feed_forward=mlp),
            AttentionLayer(mla=mla, selection=SelectShared(), feed_forward=mlp),
            AttentionLayer(mla=mla, selection=SelectAll(), feed_forward=mlp),
            MambaLayer(num_heads=4, head_dim=4, state_size=6, num_groups=2),
        ),
    )


@cache
def tiny_weights(seed: int = 0) -> Weights:
    """Float64 weights of ``tiny_hybrid``."""
    return random_weights(tiny_hybrid(), seed=seed, dtype=torch.float64)


def tiny_options(**changes: object) -> CacheOptions:
    """Blocks so small that short requests cross many of them, split in two."""
    options = CacheOptions(
        attention_block_size=4,
        sparse_block_size=8,
        kernel_block_sizes=(4,),
        mamba_block_size=8,
    )
    return replace(options, **changes)  # type: ignore[arg-type]  # tests name real fields


def tiny_limits(**changes: object) -> ServingLimits:
    """Room for four requests of 96 tokens, 16 tokens a step."""
    limits = ServingLimits(max_model_len=96, max_num_reqs=4, max_num_batched_tokens=16)
    return replace(limits, **changes)  # type: ignore[arg-type]  # tests name real fields


@dataclass(frozen=True)
class Traffic:
    """Requests, and the step each of them arrives at.

    Attributes:
        prompts: Their prompts.
        params: How each is sampled.
        arrivals: The step after which each is added.
    """

    prompts: list[list[int]]
    params: list[SamplingParams]
    arrivals: list[int] = field(default_factory=list)


def random_prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """Draw prompts of the given lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths]


def greedy_traffic(seed: int, lengths: Sequence[int], max_new_tokens: int = 12) -> Traffic:
    """Draw prompts that arrive together and are decoded greedily."""
    prompts = random_prompts(seed, lengths)
    return Traffic(prompts, [SamplingParams(max_new_tokens=max_new_tokens)] * len(prompts))


def tiny_engine(
    limits: ServingLimits | None = None,
    options: CacheOptions | None = None,
    *,
    num_blocks: int | Sequence[int] | None = None,
    drafter: Drafter | None = None,
    batch_sizes: Sequence[int] = (),
    sanitizes: bool = True,
    max_steps_in_flight: int = 2,
) -> Engine:
    """An engine over ``tiny_hybrid``, its tables checked in every step."""
    return Engine(
        tiny_hybrid(),
        tiny_weights(),
        limits or tiny_limits(),
        options=options or tiny_options(),
        num_blocks=num_blocks,
        drafter=drafter,
        graphs=GraphOptions(batch_sizes=tuple(batch_sizes), capture=recompute),
        sanitizes=sanitizes,
        max_steps_in_flight=max_steps_in_flight,
    )


def recompute(work: Work) -> Work:
    """Stand in for a CUDA graph: the same work again, with what its tensors hold by then.

    Every number of the host stays what it was at the capture, and a tensor that moved is missed.
    """
    work()
    return work


def decode(engine: Engine, traffic: Traffic) -> list[list[int]]:
    """Run all requests to their end; return their outputs, and check that no block is lost."""
    arrivals = traffic.arrivals or [0] * len(traffic.prompts)
    waiting = sorted(range(len(arrivals)), key=arrivals.__getitem__)
    requests = {}
    num_calls = 0
    while waiting or engine.has_work:
        while waiting and arrivals[waiting[0]] <= num_calls:
            index = waiting.pop(0)
            requests[index] = engine.add_request(traffic.prompts[index], traffic.params[index])
        engine.step()
        num_calls += 1
    for pool in engine.pools:
        assert pool.num_used == 0
        assert pool.num_free == pool.capacity
    return [requests[index].output for index in range(len(arrivals))]


def dense_hybrid(dtype: torch.dtype = torch.float64) -> DenseModel:
    """Return the dense reference of the built-in hybrid."""
    config = hybrid_config()
    return DenseModel(config, random_weights(config, seed=0, dtype=dtype))


def dense_greedy(
    model: DenseModel, prompt: Sequence[int], num_tokens: int, stop_tokens: Collection[int] = ()
) -> list[int]:
    """Return the reference's greedy continuation, by a prefill and single steps."""
    past = model.new_cache()
    output: list[int] = []
    next_tokens = list(prompt)
    while len(output) < num_tokens and not set(output[-1:]) & set(stop_tokens):
        next_tokens = [int(model.forward(next_tokens, past).logits[-1].argmax())]
        output += next_tokens
    return output


def decode_all_densely(traffic: Traffic) -> list[list[int]]:
    """Return the reference's greedy continuation of every request."""
    pairs = zip(traffic.prompts, traffic.params, strict=True)
    return [decode_densely(prompt, params) for prompt, params in pairs]


def decode_densely(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Return the reference's greedy continuation of a request to ``tiny_engine``."""
    return list(_decode_tiny(tuple(prompt), params))


@cache
def _decode_tiny(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    # many tests start from the same requests
    model = DenseModel(tiny_hybrid(), tiny_weights())
    return dense_greedy(model, prompt, params.max_new_tokens, params.stop_tokens)


class SpoiledDrafter:
    """Knows the greedy continuations, and spoils a part of them.

    Attributes:
        acceptance: The share of drafts left as they are.
        is_ragged: Whether it proposes fewer than asked now and then.
    """

    def __init__(
        self,
        traffic: Traffic,
        outputs: Sequence[Sequence[int]],
        acceptance: float,
        *,
        seed: int = 0,
        is_ragged: bool = False,
    ) -> None:
        """Take the texts that requests will grow to."""
        self._texts = [
            [*prompt, *output] for prompt, output in zip(traffic.prompts, outputs, strict=True)
        ]
        self.acceptance = acceptance
        self.is_ragged = is_ragged
        self._draw = random.Random(seed)

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Return what follows ``tokens`` in the text that begins with them, partly spoiled."""
        text = next(text for text in self._texts if text[: len(tokens)] == list(tokens))
        count = self._draw.randint(0, max_drafts) if self.is_ragged else max_drafts
        drafts = text[len(tokens) : len(tokens) + count]
        return [
            token if self._draw.random() < self.acceptance else (token + 1) % VOCAB
            for token in drafts
        ]


def verdicts(engine: Engine, traffic: Traffic) -> list[Verdict]:
    """Run all requests while they are observed, and compare each with the reference."""
    recorder = Recorder()
    engine.observe(recorder)
    requests = [
        engine.add_request(prompt, params)
        for prompt, params in zip(traffic.prompts, traffic.params, strict=True)
    ]
    while engine.has_work:
        engine.step()
    model = DenseModel(tiny_hybrid(), tiny_weights())
    return [
        check_request(model, request, recorder.observations[request.request_id])
        for request in requests
    ]
