"""Feed-forward blocks in numbers: one gated block, or experts behind a router."""

from __future__ import annotations

from dataclasses import dataclass

from bt_runner.errors import BadInputError


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
