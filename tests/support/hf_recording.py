"""What a transformers model computes for one prompt: layers, index scores, choices and caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Seen = tuple[Tensor, Tensor]


@dataclass
class Recording:
    """One forward pass over a whole prompt, with a cache.

    Attributes:
        logits: ``[T, vocab]``.
        layer_outputs: ``[T, hidden]`` each.
        choices: By layer, the index scores ``[T, S]`` and which of them were chosen, causality
            included; layers with an indexer of their own only.
        cache: The cache after the prompt, as transformers keeps it.
    """

    logits: Tensor
    layer_outputs: list[Tensor] = field(default_factory=list)
    choices: dict[int, Seen] = field(default_factory=dict)
    cache: Any = None


@torch.no_grad()
def record(model: Any, token_ids: list[int]) -> Recording:
    """Run a model over a prompt and keep what it computes on the way."""
    layers = getattr(model, "model", None) or model.backbone
    recording = Recording(torch.empty(0))

    def keep(_module: Any, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        recording.layer_outputs.append(hidden[0])

    with ExitStack() as stack:
        for index, layer in enumerate(layers.layers):
            stack.callback(layer.register_forward_hook(keep).remove)
            indexer = getattr(getattr(layer, "self_attn", None), "indexer", None)
            if indexer is not None:
                stack.enter_context(_watched(indexer, index, recording.choices))
        output = model(torch.tensor([token_ids]), use_cache=True)
    recording.logits, recording.cache = output.logits[0], output.cache
    return recording


@contextmanager
def _watched(indexer: Any, layer: int, choices: dict[int, Seen]) -> Iterator[None]:
    forward, topk = indexer.forward, torch.Tensor.topk

    def watched_topk(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = topk(scores, *args, **kwargs)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, result.indices, True)
        choices[layer] = scores[0], (chosen & scores.isfinite())[0]
        return result

    def watched_forward(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch.Tensor, "topk", watched_topk):
            return forward(*args, **kwargs)

    with mock.patch.object(indexer, "forward", watched_forward):
        yield


@torch.no_grad()
def greedy(model: Any, token_ids: list[int], num_tokens: int) -> list[int]:
    """Return what ``generate`` appends to a prompt."""
    prompt = torch.tensor([token_ids])
    sequence = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    return list(sequence[0, len(token_ids) :].tolist())
