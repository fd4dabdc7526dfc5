"""Attention in numbers: latents, heads, and which tokens a query sees."""

from __future__ import annotations

from dataclasses import dataclass

from bt_runner.errors import BadInputError
from bt_runner.models.layers.rope import Rope


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
