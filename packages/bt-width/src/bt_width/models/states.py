"""Recurrent layers: the shapes of their states and convolutions, by kind of recurrence."""

from __future__ import annotations

from ..errors import UnknownModelError
from .caches import StateCache
from .fields import Fields


def mamba1(fields: Fields, *, prefix: str = "mamba_") -> StateCache:
    """Return Mamba's state: one vector per channel, and the convolution's inputs.

    Args:
        fields: The config.
        prefix: What the keys begin with in families that mix Mamba with attention.
    """
    if prefix:
        channels = fields.count("mamba_expand") * fields.count("hidden_size")
        size, kernel = fields.count("mamba_d_state"), fields.count("mamba_d_conv")
    else:
        channels = _channels(fields)
        size = fields.count("state_size")
        kernel = fields.count("conv_kernel")
    return StateCache(
        state_shape=(channels, size), conv_parts=((channels, 1),), conv_taps=kernel - 1
    )


def _channels(fields: Fields) -> int:
    if fields.has("intermediate_size"):
        return fields.count("intermediate_size")
    return fields.count("expand") * fields.count("hidden_size")


def mamba2(
    fields: Fields,
    *,
    heads: tuple[str, ...],
    dims: tuple[str, ...],
    sizes: tuple[str, ...],
    groups: tuple[str, ...],
    kernels: tuple[str, ...],
    channels: tuple[str, ...] = (),
    expands: tuple[str, ...] = (),
) -> StateCache:
    """Return Mamba2's state, per head, and its convolution's inputs: the heads', B's and C's.

    Args:
        fields: The config.
        heads: The keys that may hold the number of heads.
        dims: The keys that may hold a head's channels; "auto" or none means all channels
            divided by the heads.
        sizes: The keys that may hold the numbers that a channel remembers.
        groups: The keys that may hold the groups that share B and C.
        kernels: The keys that may hold the taps of the convolution.
        channels: The keys that may hold all channels.
        expands: The keys that may hold the channels as a multiple of the hidden size.
    """
    num_heads = fields.count(*heads)
    given = [name for name in dims if fields.raw(name) not in (None, "auto")]
    if given:
        head_dim = fields.count(*given)
    else:
        if channels and fields.has(*channels):
            total = fields.count(*channels)
        elif expands:
            total = fields.count(*expands) * fields.count("hidden_size")
        else:
            raise fields.lacking(*dims)
        head_dim, rest = divmod(total, num_heads)
        if rest:
            raise UnknownModelError(
                f"{total} channels of the recurrent state are not a multiple of {num_heads} heads",
                key=heads[0],
            )
    size, num_groups = fields.count(*sizes), fields.count(*groups)
    return StateCache(
        state_shape=(num_heads, head_dim, size),
        conv_parts=((num_heads, head_dim), (num_groups, 2 * size)),
        conv_taps=fields.count(*kernels) - 1,
    )


def mamba2_of_hybrid(fields: Fields) -> StateCache:
    """Return the Mamba2 state of a family that names it as Bamba does."""
    return mamba2(
        fields,
        heads=("mamba_n_heads",),
        dims=("mamba_d_head",),
        sizes=("mamba_d_state",),
        groups=("mamba_n_groups",),
        kernels=("mamba_d_conv",),
        channels=("mamba_d_ssm",),
        expands=("mamba_expand",),
    )


def gated_delta_net(fields: Fields) -> StateCache:
    """Return the state of a gated delta net: keys by values, per value head."""
    key_heads = fields.count("linear_num_key_heads")
    key_dim = fields.count("linear_key_head_dim")
    value_heads = fields.count("linear_num_value_heads")
    value_dim = fields.count("linear_value_head_dim")
    return StateCache(
        state_shape=(value_heads, key_dim, value_dim),
        conv_parts=((key_heads, 2 * key_dim), (value_heads, value_dim)),
        conv_taps=fields.count("linear_conv_kernel_dim") - 1,
    )


def delta_attention(num_heads: int, head_dim: int, kernel: int) -> StateCache:
    """Return the state of Kimi's delta attention: one convolution over queries, keys, values."""
    return StateCache(
        state_shape=(num_heads, head_dim, head_dim),
        conv_parts=((num_heads, 3 * head_dim),),
        conv_taps=kernel - 1,
    )


def lightning(num_heads: int, head_dim: int) -> StateCache:
    """Return the state of lightning attention: keys by values per head, no convolution."""
    return StateCache(state_shape=(num_heads, head_dim, head_dim))


def short_convolution(fields: Fields) -> StateCache:
    """Return the inputs of a short convolution over the hidden channels."""
    return StateCache(
        state_shape=(),
        conv_parts=((fields.count("hidden_size"), 1),),
        conv_taps=fields.count("conv_L_cache") - 1,
    )
