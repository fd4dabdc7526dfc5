"""What one layer of a model keeps in the cache, in bytes; it knows no blocks and no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

_INDEX_SCALE_BYTES = 4
_INDEX_KEYS_PER_SCALE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCache:
    """MLA: one latent and one rotary key a token, for all heads.

    Attributes:
        lora_rank: Numbers of the latent.
        rope_dim: Numbers of the rotary key.
    """

    name: ClassVar[str] = "mla"
    lora_rank: int
    rope_dim: int

    def token_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of a token at ``dtype_bytes`` a number."""
        return (self.lora_rank + self.rope_dim) * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCache:
    """The keys of a lightning indexer: an 8-bit number each, and one scale for every 128.

    Attributes:
        head_dim: Numbers of an index key.
    """

    name: ClassVar[str] = "indexer"
    head_dim: int

    def token_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of a token; index keys are 8-bit whatever the rest of the cache is."""
        num_scales = -(-self.head_dim // _INDEX_KEYS_PER_SCALE)
        return self.head_dim + num_scales * _INDEX_SCALE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueCache:
    """Plain attention: a key and a value a token and head.

    Attributes:
        num_heads: Key-value heads.
        head_dim: Numbers of a key, and of a value.
    """

    name: ClassVar[str] = "attention"
    num_heads: int
    head_dim: int

    def token_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of a token at ``dtype_bytes`` a number."""
        return 2 * self.num_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCache:
    """Mamba2: a recurrent state, and the last inputs of the convolution.

    Attributes:
        num_heads: Heads of the state.
        head_dim: Channels of a head.
        state_size: Numbers a channel remembers.
        num_groups: Groups of heads that share B and C.
        conv_kernel: Taps of the convolution; one less is kept.
    """

    name: ClassVar[str] = "mamba"
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int

    def recurrent_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of the recurrent state."""
        return self.num_heads * self.head_dim * self.state_size * dtype_bytes

    def conv_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of the convolution's inputs: the heads', B's and C's channels."""
        channels = self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size
        return channels * (self.conv_kernel - 1) * dtype_bytes


TokenCache: TypeAlias = LatentCache | IndexCache | KeyValueCache
"""What grows with a request's tokens."""

LayerCache: TypeAlias = TokenCache | StateCache
"""What a layer keeps; the union is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """A model as its cache sees it.

    Attributes:
        model_type: The family's name.
        layers: What each layer keeps; nothing for a layer without attention or state.
        max_positions: The longest request the model was made for, where its config says.
        dtype: The model's dtype, where its config says; the cache has it unless told otherwise.
        state_dtype: The dtype of its recurrent states.
    """

    model_type: str
    layers: tuple[tuple[LayerCache, ...], ...]
    max_positions: int | None = None
    dtype: str | None = None
    state_dtype: str = "float32"
