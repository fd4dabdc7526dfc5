"""Reads a Hugging Face config into what each layer of its model keeps."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import InvalidSpecError, UnknownModelError, shown
from .families import FAMILIES
from .fields import Fields
from .model import ModelCaches

_TEXT_CONFIGS = ("text_config", "language_config", "llm_config", "thinker_config")

_MAX_DEPTH = 2
"""How deep a language model's config may lie in others."""

_REFUSALS = (
    ("is_encoder_decoder", "caches of cross-attention are not planned here"),
    ("add_cross_attention", "caches of cross-attention are not planned here"),
    ("cross_attention_layers", "caches of cross-attention are not planned here"),
    ("compress_ratios", "caches of compressed attention (DeepSeek-V4) are not planned here"),
    ("compress_rates", "caches of compressed attention (DeepSeek-V4) are not planned here"),
)


def read_model(config: Mapping[str, object]) -> ModelCaches:
    """Return what each layer of a published model keeps in its cache.

    The language model of a multimodal config is entered. Nothing is guessed.

    Args:
        config: A Hugging Face ``config.json``, parsed.

    Raises:
        UnknownModelError: The family is not known, or the config leaves open what it
            keeps; the message names the key.
        InvalidSpecError: A key has the wrong type or is out of range; it is named.
    """
    outer = Fields.of(config)
    fields = outer
    for _ in range(_MAX_DEPTH):
        inner = next((name for name in _TEXT_CONFIGS if fields.has(name)), None)
        if inner is None:
            break
        fields = fields.inside(inner)
    for key, why in _REFUSALS:
        for place in (outer, fields):
            if place.raw(key) not in (None, False, [], ()):
                raise UnknownModelError(f"{key}: {why}", key=key)
    family = _family(outer, fields)
    if family not in FAMILIES:
        raise UnknownModelError(
            f"model_type {shown(family)}: what this family keeps in its cache is not known; "
            "give its groups with --group, or see the documentation for the known families",
            key="model_type",
            model_type=family,
        )
    layers, drafts, draft_doubt = FAMILIES[family](fields)
    cache_dtype, cache_doubt = _declared_cache(outer, fields)
    return ModelCaches(
        model_type=family,
        layers=tuple(layers),
        draft_layers=tuple(drafts),
        draft_doubt=draft_doubt,
        max_positions=_max_positions(fields),
        dtype=fields.text("dtype", "torch_dtype") or outer.text("dtype", "torch_dtype"),
        cache_dtype=cache_dtype,
        cache_doubt=cache_doubt,
        state_dtype=fields.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype") or "float32",
    )


def _family(outer: Fields, fields: Fields) -> str:
    family = fields.text("model_type")
    if family is not None:
        return family
    if fields is not outer:
        raise UnknownModelError(
            "text_config.model_type is missing, so the family of the language model is not known",
            key="text_config.model_type",
        )
    if fields.has("ssm_cfg") and fields.has("d_model"):
        return "mamba_ssm"
    raise fields.lacking("model_type")


def _max_positions(fields: Fields) -> int | None:
    names = ("max_position_embeddings", "model_max_length", "max_sequence_length")
    return fields.count(*names) if fields.has(*names) else None


def _declared_cache(outer: Fields, fields: Fields) -> tuple[str | None, str]:
    """Return the dtype that a quantization config declares for the cache, or why it is open."""
    for place in (outer, fields):
        quantization = place.inside("quantization_config")
        algorithm = quantization.text("kv_cache_quant_algo") or quantization.inside(
            "quantization"
        ).text("kv_cache_quant_algo")
        if algorithm is not None:
            known = {"FP8": "fp8_e4m3", "NVFP4": "nvfp4"}
            if algorithm.upper() in known:
                return known[algorithm.upper()], ""
            return None, f"kv_cache_quant_algo {shown(algorithm)} is not known"
        if quantization.has("kv_cache_scheme"):
            return _scheme(quantization)
    return None, ""


def _scheme(quantization: Fields) -> tuple[str | None, str]:
    try:
        scheme = quantization.inside("kv_cache_scheme")
        if (scheme.count("num_bits"), scheme.text("type")) == (8, "float"):
            return "fp8_e4m3", ""
    except (InvalidSpecError, UnknownModelError):
        pass
    return None, f"kv_cache_scheme {shown(quantization.raw('kv_cache_scheme'))} is not known"
