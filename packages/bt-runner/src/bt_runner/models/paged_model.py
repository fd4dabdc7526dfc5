"""A model whose every cached state lies in blocks: embedding, layers, norm and head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bt_runner.models.caches import CONV, DENSE, INDEX, LATENT, SPARSE, STATE, Caches
from bt_runner.models.config import (
    AttentionLayer,
    MambaLayer,
    ModelConfig,
    SelectAll,
    SelectTopK,
)
from bt_runner.models.layers.feed_forward import feed_forward
from bt_runner.models.layers.mamba2 import Mamba2Mixer, StateCaches
from bt_runner.models.layers.mla import DenseAttention, LatentProjections
from bt_runner.models.layers.numerics import WORKSPACE_BYTES, Scope, rms_norm, widened
from bt_runner.models.layers.sparse_attention import Indexer, IndexProjections, SparseAttention
from bt_runner.models.sharding import Sharding
from bt_runner.models.step import ModelStep
from bt_runner.models.weights import Weights, head_of


class PagedModel:
    """Runs a step's tokens through all layers."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        caches: Caches,
        sharding: Sharding,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """Build the layers over their caches; attention's are spread over ranks.

        Args:
            config: The model.
            weights: Its tensors.
            caches: What its layers keep.
            sharding: How attention's caches are spread.
            workspace_bytes: What the temporary tensors of a layer may take; work that needs
                more is done in pieces.
        """
        self._config = config
        self._weights = weights
        self._caches = caches
        self._final_norm = weights[config.names.final_norm]
        self._head = head_of(config, weights)
        self._layers: list[_AttentionBlock | _MambaBlock] = []
        for index, layer in enumerate(config.layers):
            scope = Scope(weights, config.names.layer(index))
            eps = config.norm_eps
            match layer:
                case AttentionLayer():
                    feed = feed_forward(layer.feed_forward, scope.within("mlp"), workspace_bytes)
                    attention = _attention(
                        layer, index, scope.within("self_attn"), caches, sharding, workspace_bytes
                    )
                    self._layers.append(_AttentionBlock(attention, feed, scope, eps))
                case MambaLayer():
                    own = StateCaches(caches[index, CONV], caches[index, STATE])
                    mixer = Mamba2Mixer(layer, scope.within("mixer"), own, eps, workspace_bytes)
                    self._layers.append(_MambaBlock(mixer, scope, eps))

    def forward(self, step: ModelStep) -> list[Tensor]:
        """Return the residual stream after each layer, ``[T, hidden]`` each."""
        # turned anew in every replay: positions change, their tensor does not
        step = replace(step, rotations={}, places={})
        hidden = self._weights[self._config.names.embedding][step.token_ids]
        if self._config.float32_residual:
            hidden = widened(hidden)
        chosen: Tensor | None = None
        outputs = []
        for layer in self._layers:
            hidden, chosen = layer(hidden, step, chosen)
            outputs.append(hidden)
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[S, vocab]`` for the residual stream ``hidden`` [S, hidden]."""
        return F.linear(rms_norm(hidden, self._final_norm, self._config.norm_eps), self._head)

    def copy_blocks(self, group: int, source_ids: Tensor, target_ids: Tensor) -> None:
        """Copy blocks of all a group's caches; nothing where the target is the null block."""
        self._caches.copy(group, source_ids, target_ids)


def _attention(
    layer: AttentionLayer,
    index: int,
    scope: Scope,
    caches: Caches,
    sharding: Sharding,
    workspace_bytes: int,
) -> DenseAttention | SparseAttention:
    projections, cache = LatentProjections(layer.mla, scope), caches[index, LATENT]
    indexer = None
    match layer.selection:
        case SelectAll():
            return DenseAttention(projections, cache, DENSE, sharding, workspace_bytes)
        case SelectTopK() as selection:
            own = IndexProjections(selection, scope.within("indexer"))
            indexer = Indexer(own, caches[index, INDEX], SPARSE)
    return SparseAttention(projections, cache, SPARSE, sharding, indexer, workspace_bytes)


class _AttentionBlock:
    """MLA, then a feed-forward block, each after a norm and added to the residual stream."""

    def __init__(
        self,
        attention: DenseAttention | SparseAttention,
        feed_forward: Callable[[Tensor], Tensor],
        scope: Scope,
        eps: float,
    ) -> None:
        self._attention = attention
        self._feed_forward = feed_forward
        self._first_norm = scope["input_layernorm.weight"]
        self._second_norm = scope["post_attention_layernorm.weight"]
        self._eps = eps

    def __call__(
        self, hidden: Tensor, step: ModelStep, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        normed = rms_norm(hidden, self._first_norm, self._eps)
        if isinstance(self._attention, SparseAttention):
            attended, chosen = self._attention(normed, step, chosen)
        else:
            attended = self._attention(normed, step)
        hidden = hidden + attended
        normed = rms_norm(hidden, self._second_norm, self._eps)
        return hidden + self._feed_forward(normed), chosen


class _MambaBlock:
    """A Mamba2 mixer after a norm, added to the residual stream."""

    def __init__(self, mixer: Mamba2Mixer, scope: Scope, eps: float) -> None:
        self._mixer = mixer
        self._norm = scope["norm.weight"]
        self._eps = eps

    def __call__(
        self, hidden: Tensor, step: ModelStep, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return hidden + self._mixer(rms_norm(hidden, self._norm, self._eps), step), chosen
