"""From a checkpoint's fields to a model's configuration: which families there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bt_runner.errors import BadInputError
from bt_runner.models.checkpoint.fields import Fields
from bt_runner.models.config import (
    MLA,
    MLP,
    AttentionLayer,
    MambaLayer,
    ModelConfig,
    MoE,
    SelectAll,
    Selection,
    SelectShared,
    SelectTopK,
    TensorNames,
)
from bt_runner.models.layers.numerics import Rope, Yarn
from bt_width.errors import shown

MAX_LAYERS = 10_000
"""Layers beyond which a number is taken for a slip; the largest published models have hundreds."""


def stop_tokens(fields: Fields) -> tuple[int, ...]:
    """Return the tokens that end a text: none, one or several."""
    value = fields.raw("eos_token_id")
    if isinstance(value, list) and all(type(token) is int for token in value):
        return tuple(value)
    return () if value is None else (fields.get("eos_token_id", int),)


def _is_tied(fields: Fields) -> bool:
    return fields.get("tie_word_embeddings", bool, False)


DEEPSEEK_FAMILIES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")


def deepseek_config(fields: Fields) -> ModelConfig:
    """Return the configuration of a model of one of the three families.

    Raises:
        BadInputError: A field is missing or odd, or asks for what is not built here.
    """
    family = fields.get("model_type", str)
    fields.only("moe_layer_freq", 1)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    num_layers = fields.count("num_hidden_layers", maximum=MAX_LAYERS)
    fields.per_layer("layer_types", num_layers, ("indexed_attention",))
    heads = fields.count("num_attention_heads")
    # without a latent its queries come from the residual stream; an indexer's need the latent
    is_null = "q_lora_rank" in fields and fields.raw("q_lora_rank") is None
    has_latent = family != "deepseek_v3" or not is_null
    fields.only("num_key_value_heads", heads)
    mla = MLA(
        num_heads=heads,
        q_lora_rank=fields.count("q_lora_rank") if has_latent else None,
        kv_lora_rank=fields.count("kv_lora_rank"),
        nope_dim=fields.count("qk_nope_head_dim"),
        v_dim=fields.count("v_head_dim"),
        rope=_rope(fields, interleaved=fields.get("rope_interleave", bool, True)),
        has_bias=fields.get("attention_bias", bool, False),
    )
    mlp = MLP(intermediate_size=fields.count("intermediate_size"))
    moe = _moe(fields)
    kinds = fields.per_layer("mlp_layer_types", num_layers, ("dense", "sparse"))
    num_dense = fields.get("first_k_dense_replace", int, 3)
    layers = [
        AttentionLayer(
            mla=mla,
            selection=selection,
            feed_forward=moe
            if (kinds[index] == "sparse" if kinds else index >= num_dense)
            else mlp,
        )
        for index, selection in enumerate(_selections(fields, family, num_layers))
    ]
    return ModelConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        layers=tuple(layers),
        norm_eps=fields.get("rms_norm_eps", float, 1e-5 if family == "glm_moe_dsa" else 1e-6),
        max_positions=fields.count("max_position_embeddings"),
        stop_token_ids=stop_tokens(fields),
        names=TensorNames(is_tied=_is_tied(fields)),
    )


def _moe(fields: Fields) -> MoE:
    return MoE(
        num_experts=fields.count("n_routed_experts"),
        top_k=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("moe_intermediate_size"),
        num_groups=fields.count("n_group", 1),
        top_groups=fields.count("topk_group", 1),
        normalize_weights=fields.get("norm_topk_prob", bool, True),
        routed_scale=fields.get("routed_scaling_factor", float, 1.0),
        num_shared=fields.count("n_shared_experts", 1),
    )


def _rope(fields: Fields, *, interleaved: bool) -> Rope:
    # newer files hold all of it in one field, older ones keep theta outside; of a file that has
    # both forms transformers takes the older one, and so does whoever made it
    scaling = fields.raw("rope_scaling") or fields.raw("rope_parameters") or {}
    rope = Fields.of(scaling, "rope_scaling or rope_parameters")
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    theta = rope.get("rope_theta", float, fields.get("rope_theta", float, 10_000.0))
    yarn = None
    if kind == "yarn":
        rope.only("truncate", True)
        rope.only("attention_factor")
        original = fields.raw("original_max_position_embeddings")
        positions = fields.count("max_position_embeddings")
        first_positions = (
            fields.count("original_max_position_embeddings")
            if original is not None
            else rope.count("original_max_position_embeddings", positions)
        )
        has_factor = rope.raw("factor") is not None or "factor" not in rope
        yarn = Yarn(
            factor=rope.get("factor", float) if has_factor else positions / first_positions,
            original_max_positions=first_positions,
            # 0 stands for the default, as where the field is missing
            beta_fast=rope.get("beta_fast", float, 32.0) or 32.0,
            beta_slow=rope.get("beta_slow", float, 1.0) or 1.0,
            mscale=rope.get("mscale", float, 0.0),
            mscale_all_dim=rope.get("mscale_all_dim", float, 0.0),
        )
    elif kind != "default":
        raise BadInputError(
            f"rope_type {shown(kind)} is not built here; default and yarn are", kind=kind
        )
    dim = fields.count("qk_rope_head_dim")
    return Rope(dim=dim, theta=theta, interleaved=interleaved, yarn=yarn)


def _selections(fields: Fields, family: str, num_layers: int) -> list[Selection]:
    if family == "deepseek_v3":
        return [SelectAll()] * num_layers
    is_glm = family == "glm_moe_dsa"
    indexer = SelectTopK(
        num_heads=fields.count("index_n_heads"),
        head_dim=fields.count("index_head_dim"),
        topk=fields.count("index_topk"),
        rope=_rope(fields, interleaved=fields.get("indexer_rope_interleave", bool, is_glm)),
    )
    kinds = _indexer_kinds(fields, num_layers) if is_glm else ("full",) * num_layers
    return [SelectShared() if kind == "shared" else indexer for kind in kinds]


def _indexer_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Return "full" or "shared" per layer: listed, as a pattern of letters, or every so many."""
    kinds = fields.per_layer("indexer_types", num_layers, ("full", "shared"))
    if kinds is not None:
        return kinds
    is_list = isinstance(fields.raw("index_topk_pattern"), list)
    known = ("full", "shared") if is_list else ("F", "S")
    pattern = fields.per_layer("index_topk_pattern", num_layers, known)
    if pattern is not None:
        return tuple("shared" if kind in ("S", "shared") else "full" for kind in pattern)
    freq = fields.count("index_topk_freq", 1)
    offset = fields.get("index_skip_topk_offset", int, 2)
    return tuple(
        "shared" if max(layer - offset + 1, 0) % freq else "full" for layer in range(num_layers)
    )


_INFINITE = (float("inf"), {"__float__": "Infinity"})


def mamba2_config(fields: Fields) -> ModelConfig:
    """Return the configuration of a model of the family.

    Raises:
        BadInputError: A field is missing or odd, or asks for what is not built here.
    """
    # the code these models come with applies a limit to the prompt, and to no later step
    fields.only("time_step_limit", *([0, infinity] for infinity in _INFINITE))
    hidden = fields.count("hidden_size")
    layer = MambaLayer(
        num_heads=fields.count("num_heads"),
        head_dim=fields.count("head_dim"),
        state_size=fields.count("state_size"),
        num_groups=fields.count("n_groups"),
        conv_kernel=fields.count("conv_kernel", 4),
        has_bias=fields.get("use_bias", bool, False),
        has_conv_bias=fields.get("use_conv_bias", bool, True),
    )
    fields.only("expand", layer.inner_size / hidden)
    names = TensorNames(
        embedding="backbone.embeddings.weight",
        layers="backbone.layers",
        final_norm="backbone.norm_f.weight",
        is_tied=_is_tied(fields),
    )
    return ModelConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        layers=(layer,) * fields.count("num_hidden_layers", maximum=MAX_LAYERS),
        norm_eps=fields.get("layer_norm_epsilon", float, 1e-5),
        # a state has no length; the text may be as long as the loop allows
        max_positions=2**31 - 1,
        stop_token_ids=stop_tokens(fields),
        float32_residual=fields.get("residual_in_fp32", bool, True),
        names=names,
    )


_CONFIGS: dict[str, Callable[[Fields], ModelConfig]] = {
    **dict.fromkeys(DEEPSEEK_FAMILIES, deepseek_config),
    "mamba2": mamba2_config,
}

LOADED_FAMILIES = tuple(_CONFIGS)
"""What ``model_type`` may be."""


def read_config(directory: Path) -> ModelConfig:
    """Return the configuration of a checkpoint.

    Raises:
        BadInputError: The file is missing or broken, is of none of ``LOADED_FAMILIES``, or asks
            for what is not built here.
    """
    fields = Fields.read(directory / "config.json")
    config = config_of(fields)
    quantization = fields.raw("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise BadInputError(
            f"{directory} is quantized ({shown(method or quantization)}, as quantization_config "
            "says), and quantized tensors are not read: convert it to bfloat16 first",
            quantization_config=quantization,
        )
    further = directory / "generation_config.json"
    if not further.exists():
        return config
    # what stops a text when transformers generates one: this file comes first
    stops = stop_tokens(Fields.read(further))
    return replace(config, stop_token_ids=stops or config.stop_token_ids)


def config_of(fields: Fields) -> ModelConfig:
    """Return the configuration of a checkpoint's fields, however its weights are stored.

    Raises:
        BadInputError: As ``read_config``.
    """
    family = fields.get("model_type", str)
    if family not in _CONFIGS:
        raise BadInputError(
            f"{shown(family)[1:-1]} models are not built here; {', '.join(LOADED_FAMILIES)} are",
            model_type=family,
        )
    fields.only("hidden_act", "silu")
    return _CONFIGS[family](fields)
