"""A model in numbers, layer by layer, and the built-in one; it knows no tensors and no files."""

from __future__ import annotations

from dataclasses import dataclass, field

from bt_runner.arguments import require_int, require_kind
from bt_runner.errors import BadInputError
from bt_runner.models.layers.numerics import Rope


@dataclass(frozen=True, slots=True)
class SelectAll:
    """Dense attention: every token sees every earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectTopK:
    """Sparse attention: the layer's own lightning indexer chooses what each token sees.

    Attributes:
        num_heads: Index heads, whose weighted scores are added up.
        head_dim: Width of an index query and of the cached index key.
        topk: Tokens chosen for each query.
        rope: The embedding of the first ``rope.dim`` dimensions of a head.
        norm_eps: Epsilon of the key's layer norm.
    """

    num_heads: int
    head_dim: int
    topk: int
    rope: Rope
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse index heads narrower than what is rotated of them."""
        if self.head_dim < self.rope.dim:
            raise BadInputError(
                f"index heads of {self.head_dim} dimensions cannot rotate {self.rope.dim} of them",
                head_dim=self.head_dim,
                rope_dim=self.rope.dim,
            )


@dataclass(frozen=True, slots=True)
class SelectShared:
    """Sparse attention to what the nearest ``SelectTopK`` layer below chose."""


Selection = SelectAll | SelectTopK | SelectShared


@dataclass(frozen=True, slots=True, kw_only=True)
class MLA:
    """Multi-head latent attention.

    Attributes:
        num_heads: Query heads; all share one cached latent and one cached rotary key.
        q_lora_rank: Width of the query's latent; None where heads are projected directly.
        kv_lora_rank: Width of the cached latent.
        nope_dim: Dimensions of a head without position.
        v_dim: Dimensions of a head's value.
        rope: The embedding of a head's rotary dimensions, as wide as the cached rotary key.
        has_bias: Whether the projections next to the residual stream have a bias.
        latent_norm_eps: Epsilon of the two latents' norms, which is not the model's.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    v_dim: int
    rope: Rope
    has_bias: bool = False
    latent_norm_eps: float = 1e-6

    @property
    def qk_dim(self) -> int:
        """Dimensions of a query head, rotary ones included."""
        return self.nope_dim + self.rope.dim

    @property
    def softmax_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return float(self.qk_dim**-0.5) * self.rope.softmax_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """A gated feed-forward block: ``down(silu(gate(x)) * up(x))``."""

    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """Routed experts beside shared ones, with DeepSeek's router.

    Attributes:
        num_experts: Routed experts.
        top_k: Experts chosen per token.
        intermediate_size: Hidden width of one expert.
        num_groups: Groups of equal size that experts are chosen within.
        top_groups: Groups a token may choose from.
        normalize_weights: Whether the chosen experts' weights add up to ``routed_scale``.
        routed_scale: Factor of the routed experts' output.
        num_shared: Experts that every token goes through, stored as one wide block.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    num_groups: int = 1
    top_groups: int = 1
    normalize_weights: bool = True
    routed_scale: float = 1.0
    num_shared: int = 1

    def __post_init__(self) -> None:
        """Refuse experts that cannot be grouped or chosen as told."""
        reachable = self.num_experts // self.num_groups * self.top_groups
        if (
            self.num_experts % self.num_groups
            or self.top_groups > self.num_groups
            or self.top_k > reachable
        ):
            raise BadInputError(
                f"{self.top_k} of {self.num_experts} experts cannot be chosen from "
                f"{self.top_groups} of {self.num_groups} groups",
                num_experts=self.num_experts,
                num_groups=self.num_groups,
                top_groups=self.top_groups,
                top_k=self.top_k,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaLayer:
    """A Mamba2 mixer after a norm, added to the residual stream.

    Attributes:
        num_heads: Heads of the state.
        head_dim: Channels of a head.
        state_size: Numbers a channel remembers.
        num_groups: Groups of heads that share B and C, and of channels that the gated norm takes.
        conv_kernel: Taps of the convolution; its state holds one less.
        has_bias: Whether the input and output projections have a bias.
        has_conv_bias: Whether the convolution has one.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    conv_kernel: int = 4
    has_bias: bool = False
    has_conv_bias: bool = True

    def __post_init__(self) -> None:
        """Refuse heads that cannot be shared out among the groups."""
        if self.num_heads % self.num_groups:
            raise BadInputError(
                f"{self.num_heads} heads cannot be shared out among {self.num_groups} groups",
                num_heads=self.num_heads,
                num_groups=self.num_groups,
            )

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels the convolution runs over: the heads', then B's and C's of every group."""
        return self.inner_size + 2 * self.num_groups * self.state_size


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
    """How a family of checkpoints names the tensors around its layers.

    Attributes:
        embedding: The embedding.
        layers: What the names of all layers start with.
        final_norm: The norm above the last layer.
        head: The head.
        is_tied: Whether the embedding is the head where no other is stored.
    """

    embedding: str = "model.embed_tokens.weight"
    layers: str = "model.layers"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    is_tied: bool = False

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
        names: The tensors around the layers.
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


def hybrid_config() -> ModelConfig:
    """Return the built-in model, small and of bytes: Mamba2, sparse MLA, dense MLA, twice over.

    Sixteen index heads make it all but impossible that two scores are exactly equal, and 64 chosen
    tokens are few beside the longest prompts, so that the choice matters.
    """
    rope = Rope(dim=8)
    mla = MLA(num_heads=4, q_lora_rank=48, kv_lora_rank=32, nope_dim=16, v_dim=16, rope=rope)
    indexer = SelectTopK(num_heads=16, head_dim=16, topk=64, rope=Rope(dim=8, interleaved=False))
    mlp = MLP(intermediate_size=128)
    mamba = MambaLayer(num_heads=8, head_dim=16, state_size=16, num_groups=2)
    sparse = AttentionLayer(mla=mla, selection=indexer, feed_forward=mlp)
    dense = AttentionLayer(mla=mla, selection=SelectAll(), feed_forward=mlp)
    return ModelConfig(
        vocab_size=256,
        hidden_size=64,
        layers=(mamba, sparse, dense, mamba, sparse, dense),
    )
