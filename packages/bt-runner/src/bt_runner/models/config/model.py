"""A model in numbers: its layers, lowest first, and what its tensors are called."""

from __future__ import annotations

from dataclasses import dataclass, field

from bt_runner.arguments import require_int, require_kind
from bt_runner.errors import BadInputError
from bt_runner.models.config.attention import MLA, Selection, SelectShared, SelectTopK
from bt_runner.models.config.feed_forward import MLP, MoE
from bt_runner.models.config.mamba2 import MambaLayer

MAX_EXPERTS = 2**20
"""Experts of a model beyond which a number is taken for a slip: each has three tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """MLA and a feed-forward block, each after a norm and added to the residual stream."""

    mla: MLA
    selection: Selection
    feed_forward: MLP | MoE

    def __post_init__(self) -> None:
        """Refuse an indexer without the latent that its queries are projected from."""
        if isinstance(self.selection, SelectTopK) and self.mla.q_lora_rank is None:
            raise BadInputError("an indexer needs the latent of the queries: set q_lora_rank")


LayerConfig = AttentionLayer | MambaLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """How a family of checkpoints names the tensors around its layers."""

    embedding: str = "model.embed_tokens.weight"
    layers: str = "model.layers"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"

    def layer(self, index: int) -> str:
        """Return what the names of a layer's tensors start with."""
        return f"{self.layers}.{index}."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model: an embedding, layers, a norm and a head.

    Attributes:
        vocab_size: Tokens.
        hidden_size: Width of the residual stream.
        layers: The layers, lowest first.
        norm_eps: Epsilon of every norm that states no other.
        max_positions: The longest request the model was made for, in tokens.
        stop_token_ids: Tokens that end a text.
        float32_residual: Whether the residual stream is at least float32, whatever the weights are.
        names: The tensors around the layers; a tied head is named like the embedding.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float = 1e-6
    max_positions: int = 4096
    stop_token_ids: tuple[int, ...] = ()
    float32_residual: bool = False
    names: TensorNames = field(default_factory=TensorNames)

    def __post_init__(self) -> None:
        """Check the numbers, and that a choice is made below every layer that shares one."""
        require_int("vocab_size", self.vocab_size, minimum=1)
        require_int("hidden_size", self.hidden_size, minimum=1)
        require_int("max_positions", self.max_positions, minimum=1)
        require_kind("names", self.names, TensorNames)
        require_kind("layers", self.layers, tuple)
        for index, layer in enumerate(self.layers):
            require_kind(f"layer {index}", layer, AttentionLayer, MambaLayer)
        num_experts = sum(
            layer.feed_forward.num_experts
            for layer in self.layers
            if isinstance(layer, AttentionLayer) and isinstance(layer.feed_forward, MoE)
        )
        if num_experts > MAX_EXPERTS:
            raise BadInputError(
                f"{num_experts:,} experts in all layers together are more than {MAX_EXPERTS:,}",
                num_experts=num_experts,
            )
        has_choice = False
        for index, layer in enumerate(self.layers):
            if isinstance(layer, AttentionLayer):
                has_choice = has_choice or isinstance(layer.selection, SelectTopK)
                if isinstance(layer.selection, SelectShared) and not has_choice:
                    raise BadInputError(
                        f"layer {index} shares the choice of an indexer below it, and none is "
                        "there; the first sparse layer needs an indexer of its own",
                        layer=index,
                    )
