"""The dense reference: one request, contiguous caches, the whole prompt at once.

It knows no blocks, tables, slots or batches, and has its own maths: only the configuration's
numbers, rotary frequencies among them, are those the paged path is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional

from bt_runner.dense.attention import AttentionCache, attend, empty_attention_cache
from bt_runner.dense.feed_forward import feed_forward
from bt_runner.dense.mamba import MambaCache, empty_mamba_cache, mix
from bt_runner.dense.numerics import rms_norm, widen
from bt_runner.dense.selection import Choice
from bt_runner.models.config import AttentionLayer, MambaLayer, ModelConfig
from bt_runner.models.layers.numerics import Scope
from bt_runner.models.weights import head_of

LayerCache = AttentionCache | MambaCache


@dataclass(slots=True)
class DenseCache:
    """What a request keeps between forward passes.

    Attributes:
        layers: One cache per layer.
        num_tokens: Tokens seen so far.
    """

    layers: tuple[LayerCache, ...]
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DenseOutput:
    """What one forward pass of ``T`` tokens gives, with all that a comparison may ask for.

    Attributes:
        logits: ``[T, vocab_size]``.
        layer_outputs: The residual stream after each layer, ``[T, hidden]`` each.
        choices: Per layer, what its tokens see; None for a layer that sees all or has no attention.
    """

    logits: Tensor
    layer_outputs: tuple[Tensor, ...]
    choices: tuple[Choice | None, ...]


class DenseModel:
    """A model in its simplest form: the truth that the paged path is compared with."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        """Keep the weights, without a copy."""
        self.config = config
        self.weights = weights

    def new_cache(self) -> DenseCache:
        """Return the cache of a request that has no tokens yet."""
        embedding = self.weights[self.config.names.embedding]
        layers: list[LayerCache] = []
        for layer in self.config.layers:
            match layer:
                case AttentionLayer():
                    layers.append(empty_attention_cache(layer, embedding.dtype, embedding.device))
                case MambaLayer():
                    layers.append(empty_mamba_cache(layer, embedding.dtype, embedding.device))
                case _:
                    assert_never(layer)
        return DenseCache(tuple(layers))

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], cache: DenseCache) -> DenseOutput:
        """Return the logits after each of ``token_ids``, which follow on what the cache holds."""
        names, scope = self.config.names, Scope(self.weights)
        embedding = scope[names.embedding]
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=embedding.device)
        positions = torch.arange(len(tokens), device=embedding.device) + cache.num_tokens
        x = embedding[tokens]
        if self.config.float32_residual:
            x = widen(x)
        layer_outputs, choices = [], []
        last_choice: Choice | None = None
        for index, layer_cache in enumerate(cache.layers):
            x, choice = self._layer(x, positions, index, layer_cache, last_choice)
            last_choice = choice or last_choice
            layer_outputs.append(x)
            choices.append(choice)
        cache.num_tokens += len(tokens)
        x = rms_norm(x, scope[names.final_norm], self.config.norm_eps)
        logits = functional.linear(x.to(embedding.dtype), head_of(self.config, self.weights))
        return DenseOutput(logits, tuple(layer_outputs), tuple(choices))

    def _layer(
        self,
        x: Tensor,
        positions: Tensor,
        index: int,
        cache: LayerCache,
        last_choice: Choice | None,
    ) -> tuple[Tensor, Choice | None]:
        layer, eps = self.config.layers[index], self.config.norm_eps
        scope = Scope(self.weights, self.config.names.layer(index))
        match layer, cache:
            case AttentionLayer(), AttentionCache():
                normed = rms_norm(x, scope["input_layernorm.weight"], eps)
                attended, choice = attend(
                    normed, positions, layer, scope.within("self_attn"), cache, last_choice
                )
                x = x + attended
                normed = rms_norm(x, scope["post_attention_layernorm.weight"], eps)
                return x + feed_forward(normed, layer.feed_forward, scope.within("mlp")), choice
            case MambaLayer(), MambaCache():
                normed = rms_norm(x, scope["norm.weight"], eps)
                return x + mix(normed, layer, scope.within("mixer"), cache, eps), None
            case _:
                raise TypeError(f"layer {index} was given the cache of another kind of layer")
