"""How caches are stored: the names of cache dtypes, and the bytes of what a layer keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import assert_never

from ..errors import InvalidSpecError, UnknownModelError, shown
from .caches import IndexCache, KeyValueCache, LatentCache, LayerCache, StateCache

_NUMBER_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("float32", "float"), 4),
    **dict.fromkeys(("bfloat16", "float16", "half"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("int8", "uint8", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"), 1),
}
"""Dtypes that store numbers one by one: torch's names, and those of vLLM's --kv-cache-dtype.

The 8-bit ones have one scale per layer, or per head, which takes no room in a block.
"""

_INDEX_KEYS_PER_SCALE = 128
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """How keys, values and latents are stored; states and index keys have formats of their own.

    Attributes:
        name: Its name, as ``--cache-dtype`` knows it.
        layout: What a token looks like, in words.
        source: Where that is written.
    """

    name: str
    layout: str
    source: str


FORMATS: Mapping[str, CacheFormat] = {
    "fp8_ds_mla": CacheFormat(
        name="fp8_ds_mla",
        layout="a latent of 8-bit numbers, a float32 scale for each 128 of them, and the "
        "rotary key in bfloat16: 512 + 16 + 128 = 656 bytes for 512 + 64 numbers",
        source="FlashMLA, README: FP8 KV cache; vLLM, vllm/v1/kv_cache_interface.py",
    ),
    "nvfp4": CacheFormat(
        name="nvfp4",
        layout="4-bit numbers, two in a byte, and an 8-bit scale for each 16 of a head",
        source="vLLM, vllm/v1/kv_cache_interface.py; NVIDIA, Introducing NVFP4",
    ),
}
"""Formats whose bytes are more than numbers times their size."""

KNOWN_DTYPES = (*_NUMBER_BYTES, *FORMATS)
"""What ``--cache-dtype`` may be, besides ``auto``."""


def number_bytes(name: str | None) -> int:
    """Return the bytes of a number of a plain dtype.

    Raises:
        UnknownModelError: None is named.
        InvalidSpecError: The dtype is unknown.
    """
    if name is None:
        raise UnknownModelError(
            "the config lacks dtype or torch_dtype, so the bytes of its cache are not known; "
            "give --model-dtype",
            key="dtype",
        )
    if name not in _NUMBER_BYTES:
        raise InvalidSpecError(
            f"dtype {shown(name)} has no known size; known are {', '.join(_NUMBER_BYTES)}",
            dtype=name,
        )
    return _NUMBER_BYTES[name]


def token_bytes(cache: LayerCache, cache_dtype: str | None) -> int:
    """Return the bytes of a token in one layer; 0 for a state.

    Raises:
        InvalidSpecError: The format cannot store such a cache.
    """
    match cache:
        case StateCache():
            return 0
        case IndexCache():
            # index keys are 8-bit whatever the rest of the cache is
            scales = -(-cache.head_dim // _INDEX_KEYS_PER_SCALE)
            return cache.head_dim + scales * _SCALE_BYTES
        case LatentCache():
            if cache_dtype == "fp8_ds_mla":
                _require_multiple("kv_lora_rank", cache.lora_rank, 128, cache_dtype)
                scales = cache.lora_rank // 128
                return cache.lora_rank + scales * _SCALE_BYTES + 2 * cache.rope_dim
            if cache_dtype == "nvfp4":
                raise InvalidSpecError(
                    "cache dtype nvfp4 stores keys and values; no format of it is known for "
                    "the latents of MLA: try fp8_ds_mla or fp8",
                    dtype=cache_dtype,
                )
            return (cache.lora_rank + cache.rope_dim) * number_bytes(cache_dtype)
        case KeyValueCache():
            if cache_dtype == "fp8_ds_mla":
                raise InvalidSpecError(
                    "cache dtype fp8_ds_mla stores the latents of MLA, and this model keeps "
                    "keys and values: try fp8",
                    dtype=cache_dtype,
                )
            if cache_dtype == "nvfp4":
                sizes = (cache.key_dim, cache.value_dim)
                for size in sizes:
                    _require_multiple("head_dim", size, 16, cache_dtype)
                return cache.num_heads * sum(size // 2 + size // 16 for size in sizes)
            numbers = cache.num_heads * (cache.key_dim + cache.value_dim)
            return numbers * number_bytes(cache_dtype)
        case _:
            assert_never(cache)


def state_bytes(cache: StateCache, *, state_dtype: str, conv_dtype: str | None) -> tuple[int, int]:
    """Return the bytes of one state in one layer: the recurrent state's, and the convolution's.

    Args:
        cache: What the layer keeps.
        state_dtype: The dtype of the recurrent state.
        conv_dtype: The dtype of the convolution's inputs: the model's own, whatever the
            dtype of keys and values is.
    """
    recurrent = prod(cache.state_shape) * number_bytes(state_dtype) if cache.state_shape else 0
    channels = sum(count * each for count, each in cache.conv_parts)
    if not channels * cache.conv_taps:
        return recurrent, 0
    return recurrent, channels * cache.conv_taps * number_bytes(conv_dtype)


def _require_multiple(key: str, size: int, unit: int, dtype: str) -> None:
    if size % unit:
        raise InvalidSpecError(
            f"cache dtype {dtype} has a scale for each {unit} numbers, and {key} is {size}",
            dtype=dtype,
            size=size,
        )
