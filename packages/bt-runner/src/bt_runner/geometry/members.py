"""What the layers of a group keep under one name, in bytes; it knows no tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from bt_runner.errors import BadInputError
from bt_runner.geometry.caches import LayerCache, ModelGeometry, StateCache, TokenCache

Cache = TypeVar("Cache", bound=LayerCache)

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMember:
    """What the layers of a group keep under one name.

    Attributes:
        name: What it is.
        num_layers: Layers that keep it.
        token_bytes: Bytes of a token, of all its layers.
        recurrent_bytes: Bytes of a recurrent state, of one layer.
        conv_bytes: Bytes of a convolution's inputs, of one layer.
    """

    name: str
    num_layers: int
    token_bytes: int = 0
    recurrent_bytes: int = 0
    conv_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, of all its layers."""
        return self.num_layers * (self.recurrent_bytes + self.conv_bytes)


def token_member(geometry: ModelGeometry, kind: type[TokenCache], num_bytes: int) -> CacheMember:
    """Return what all layers keep of one kind, at ``num_bytes`` a number."""
    caches = list(_kept(geometry, kind))
    return CacheMember(
        name=kind.name,
        num_layers=len(caches),
        token_bytes=sum(cache.token_bytes(num_bytes) for cache in caches),
    )


def state_member(geometry: ModelGeometry, num_bytes: int) -> CacheMember:
    """Return the states of all layers, their convolutions' inputs at ``num_bytes`` a number.

    Raises:
        BadInputError: The states' dtype has no known size.
    """
    states = list(_kept(geometry, StateCache))
    if not states:
        return CacheMember(name=StateCache.name, num_layers=0)
    # all layers of the known families keep states of one shape
    return CacheMember(
        name=StateCache.name,
        num_layers=len(states),
        recurrent_bytes=states[0].recurrent_bytes(dtype_bytes(geometry.state_dtype)),
        conv_bytes=states[0].conv_bytes(num_bytes),
    )


def dtype_bytes(name: str | None) -> int:
    """Return the bytes of a number.

    Raises:
        BadInputError: The dtype has no known size, or none is named.
    """
    if name is None:
        raise BadInputError(
            "the config lacks dtype, and torch_dtype, so the bytes of its cache are not known; "
            "give --cache-dtype",
            field="dtype",
        )
    if name not in _DTYPE_BYTES:
        raise BadInputError(
            f"the size of dtype {name!r} is not known here; known are {', '.join(_DTYPE_BYTES)}",
            dtype=name,
        )
    return _DTYPE_BYTES[name]


def _kept(geometry: ModelGeometry, kind: type[Cache]) -> Iterator[Cache]:
    for layer in geometry.layers:
        for cache in layer:
            if isinstance(cache, kind):
                yield cache
