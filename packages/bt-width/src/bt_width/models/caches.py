"""What the layers of a model keep, in numbers; it knows no bytes, no blocks and no configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..errors import InvalidSpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueCache:
    """Attention: a key and a value per token and head.

    Attributes:
        num_heads: Key-value heads.
        key_dim: Numbers of a key.
        value_dim: Numbers of a value.
        window: Tokens that a query sees, itself included; None where it is all.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCache:
    """MLA: one latent and one rotary key per token, for all heads.

    Attributes:
        lora_rank: Numbers of the latent.
        rope_dim: Numbers of the rotary key.
    """

    lora_rank: int
    rope_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCache:
    """The keys of a lightning indexer: one per token.

    Attributes:
        head_dim: Numbers of an index key.
    """

    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCache:
    """A recurrence: a state, and the last inputs of a convolution; nothing per token.

    Attributes:
        state_shape: Numbers of the recurrent state, its heads or channels first; empty
            where there is none.
        conv_parts: The convolution's channels, as pairs of how many parts tensor
            parallelism may divide and the channels of each.
        conv_taps: Inputs that are kept of each channel: one less than the kernel.
    """

    state_shape: tuple[int, ...]
    conv_parts: tuple[tuple[int, int], ...] = ()
    conv_taps: int = 0


LayerCache: TypeAlias = KeyValueCache | LatentCache | IndexCache | StateCache
"""What a layer keeps; the union is closed."""

Layer: TypeAlias = tuple[LayerCache, ...]
"""All that one layer keeps; empty for one without attention or state."""


def heads_of_rank(what: str, num_heads: int, tp: int) -> int:
    """Return the heads that one of ``tp`` ranks keeps: divided, or one that several share.

    Raises:
        InvalidSpecError: The ranks can neither divide nor share them evenly.
    """
    if num_heads % tp == 0:
        return num_heads // tp
    if tp % num_heads == 0:
        return 1
    raise InvalidSpecError(
        f"{num_heads} {what} cannot be divided or shared evenly by {tp} tensor-parallel ranks",
        num_heads=num_heads,
        tp=tp,
    )


def divided(what: str, count: int, tp: int) -> int:
    """Return a rank's part of what can only be divided.

    Raises:
        InvalidSpecError: ``tp`` does not divide it.
    """
    if count % tp:
        raise InvalidSpecError(
            f"{count} {what} cannot be divided by {tp} tensor-parallel ranks", count=count, tp=tp
        )
    return count // tp


def part_of_rank(cache: LayerCache, tp: int) -> LayerCache:
    """Return what one of ``tp`` tensor-parallel ranks keeps of a cache.

    Heads are divided, or replicated where there are fewer than ranks; latents and index
    keys belong to all heads and are replicated.
    """
    if tp == 1:
        return cache
    match cache:
        case KeyValueCache():
            return KeyValueCache(
                num_heads=heads_of_rank("key-value heads", cache.num_heads, tp),
                key_dim=cache.key_dim,
                value_dim=cache.value_dim,
                window=cache.window,
            )
        case StateCache():
            shape = cache.state_shape
            if shape:
                shape = (divided("heads of a recurrent state", shape[0], tp), *shape[1:])
            return StateCache(
                state_shape=shape,
                conv_parts=tuple(
                    (heads_of_rank("groups of a convolution", count, tp), channels)
                    for count, channels in cache.conv_parts
                ),
                conv_taps=cache.conv_taps,
            )
        case _:
            return cache
