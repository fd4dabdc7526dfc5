"""How far what an engine computed lies from what transformers computes for the same texts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from tests.support.engine_runs import Run
from tests.support.hf_recording import record
from torch import Tensor

from bt_runner.engine import Engine
from bt_runner.requests import Request


@dataclass(frozen=True)
class EngineDifferences:
    """The largest differences over all steps that were observed.

    Attributes:
        logits: Over the range of a text's logits.
        layers: Absolute, of the residual stream.
        layers_in_range: The same, over a layer's range.
    """

    logits: float
    layers: float
    layers_in_range: float

    def agree(self) -> bool:
        """Whether the two implementations compute the same in float32."""
        return self.logits < 2e-5 and self.layers < 1e-5


def engine_differences(run: Run, model: Any) -> EngineDifferences:
    """Compare every token of every step but for drafts that were not kept."""
    logits = layers = in_range = 0.0
    for request in run.requests:
        expected = record(model, request.tokens[:-1])
        for seen in run.recorder.observations[request.request_id]:
            kept = _num_kept(seen.token_ids, request.tokens[seen.start : -1])
            span = slice(seen.start, seen.start + kept)
            for ours, theirs in zip(seen.layer_outputs, expected.layer_outputs, strict=True):
                gap = _largest(ours[:kept], theirs[span])
                layers, in_range = max(layers, gap), max(in_range, gap / _range(theirs))
            first = len(seen.token_ids) - len(seen.logits)
            if first < kept:
                wanted = expected.logits[span][first:]
                gap = _largest(seen.logits[: kept - first], wanted)
                logits = max(logits, gap / _range(expected.logits))
    return EngineDifferences(logits, layers, in_range)


def _num_kept(token_ids: list[int], tokens: list[int]) -> int:
    pairs = zip(token_ids, tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def cached(engine: Engine, request: Request, layer: int, name: str) -> Tensor:
    """Return what an engine keeps of a request's tokens, token by token, or its last state."""
    group = next(
        index
        for index, group in enumerate(engine.groups)
        for tensor in group.tensors
        if (tensor.layer, tensor.name) == (layer, name)
    )
    assert request.row is not None
    layout, block_ids = engine.layouts[group], engine._scheduler.kv.block_ids_of(request.row, group)
    cache = engine._caches[layer, name]
    if layout.slot_mode == "none":
        return cache[block_ids[layout.state_column(request.num_computed)]]
    kernel_block_ids = layout.expand(block_ids)
    slots = [layout.slot(at, kernel_block_ids) for at in range(request.num_computed)]
    return cache.flatten(0, 1)[torch.tensor(slots)]


def _largest(ours: Tensor, theirs: Tensor) -> float:
    # a NaN is as far away as can be
    gap = (ours.double() - theirs.double()).abs().max().item()
    return gap if gap == gap else float("inf")


def _range(x: Tensor) -> float:
    return (torch.max(x) - torch.min(x)).item()
