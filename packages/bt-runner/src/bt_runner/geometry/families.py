"""A Hugging Face config read into what its layers keep.

Families that the runner loads go through the parser that loads them; of the others
only the keys that size the cache are read.
"""

from __future__ import annotations

from collections.abc import Callable

from bt_runner.errors import BadInputError
from bt_runner.geometry.caches import (
    IndexCache,
    KeyValueCache,
    LatentCache,
    LayerCache,
    ModelGeometry,
    StateCache,
)
from bt_runner.models.checkpoint.families import LOADED_FAMILIES, config_of
from bt_runner.models.checkpoint.fields import Fields
from bt_runner.models.config import AttentionLayer, LayerConfig, MambaLayer, SelectTopK

Layers = tuple[tuple[LayerCache, ...], ...]

_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def read_geometry(fields: Fields) -> ModelGeometry:
    """Return the geometry of a config.

    Raises:
        BadInputError: The family is not known, or a key is missing or odd; it is named.
    """
    family = fields.get("model_type", str)
    if family in LOADED_FAMILIES:
        layers = tuple(_loaded_layer(layer) for layer in config_of(fields).layers)
    elif family in _GEOMETRY_ONLY:
        layers = _GEOMETRY_ONLY[family](fields)
    else:
        raise BadInputError(
            f"what {family} models keep in their cache is not known here; known are "
            f"{', '.join(sorted([*LOADED_FAMILIES, *_GEOMETRY_ONLY]))}",
            model_type=family,
        )
    has_length = fields.raw("max_position_embeddings") is not None
    dtype_key = next((key for key in ("dtype", "torch_dtype") if fields.raw(key) is not None), None)
    return ModelGeometry(
        model_type=family,
        layers=layers,
        max_positions=fields.count("max_position_embeddings") if has_length else None,
        dtype=fields.get(dtype_key, str) if dtype_key else None,
        state_dtype=fields.get("mamba_ssm_cache_dtype", str, "float32"),
    )


def _loaded_layer(layer: LayerConfig) -> tuple[LayerCache, ...]:
    match layer:
        case MambaLayer():
            return (
                StateCache(
                    num_heads=layer.num_heads,
                    head_dim=layer.head_dim,
                    state_size=layer.state_size,
                    num_groups=layer.num_groups,
                    conv_kernel=layer.conv_kernel,
                ),
            )
        case AttentionLayer(mla=mla, selection=selection):
            latent = LatentCache(lora_rank=mla.kv_lora_rank, rope_dim=mla.rope.dim)
            if isinstance(selection, SelectTopK):
                return (latent, IndexCache(head_dim=selection.head_dim))
            return (latent,)


def _deepseek_v2(fields: Fields) -> Layers:
    latent = LatentCache(
        lora_rank=fields.count("kv_lora_rank"),
        rope_dim=fields.count("qk_rope_head_dim"),
    )
    return ((latent,),) * fields.count("num_hidden_layers")


def _falcon_h1(fields: Fields) -> Layers:
    # where it is set, it names the only layers with attention
    fields.only("attn_layer_indices")
    attention = KeyValueCache(
        num_heads=fields.count("num_key_value_heads"),
        head_dim=fields.count("head_dim"),
    )
    state = StateCache(
        num_heads=fields.count("mamba_n_heads"),
        head_dim=fields.count("mamba_d_head"),
        state_size=fields.count("mamba_d_state"),
        num_groups=fields.count("mamba_n_groups"),
        conv_kernel=fields.count("mamba_d_conv"),
    )
    return ((attention, state),) * fields.count("num_hidden_layers")


def _nemotron_h(fields: Fields) -> Layers:
    kept: dict[str, tuple[LayerCache, ...]] = {
        "attention": (
            KeyValueCache(
                num_heads=fields.count("num_key_value_heads"),
                head_dim=_head_dim(fields),
            ),
        ),
        "mamba": (
            StateCache(
                num_heads=fields.count("mamba_num_heads"),
                head_dim=fields.count("mamba_head_dim"),
                state_size=fields.count("ssm_state_size"),
                num_groups=fields.count("n_groups"),
                conv_kernel=fields.count("conv_kernel"),
            ),
        ),
        "mlp": (),
        "moe": (),
    }
    return tuple(kept[kind] for kind in _nemotron_layer_kinds(fields))


def _head_dim(fields: Fields) -> int:
    older = "attention_head_dim"
    return fields.count("head_dim" if fields.raw(older) is None else older)


def _nemotron_layer_kinds(fields: Fields) -> list[str]:
    key = "layers_block_type"
    listed = fields.raw(key)
    if isinstance(listed, list):
        kinds = [str(kind) for kind in listed]
    else:
        key = "hybrid_override_pattern"
        kinds = [_NEMOTRON_LETTERS.get(letter, letter) for letter in fields.get(key, str)]
    unknown = set(kinds) - set(_NEMOTRON_LETTERS.values())
    if unknown:
        raise BadInputError(f"{key} has layers of unknown kinds {sorted(unknown)}", field=key)
    if len(kinds) != fields.count("num_hidden_layers", len(kinds)):
        raise BadInputError(
            f"{key} lists {len(kinds)} layers, and num_hidden_layers is "
            f"{fields.raw('num_hidden_layers')}",
            field=key,
        )
    return kinds


_GEOMETRY_ONLY: dict[str, Callable[[Fields], Layers]] = {
    "deepseek_v2": _deepseek_v2,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
}
