"""A Mamba2 mixer in numbers: heads, groups and the convolution before them."""

from __future__ import annotations

from dataclasses import dataclass

from bt_runner.errors import BadInputError


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
