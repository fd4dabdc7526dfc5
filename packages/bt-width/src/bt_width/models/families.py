"""Which families are known, and how each names what its layers keep.

Families are told apart by ``model_type`` and read by the keys that they share. A key that
a family may leave out has that family's own meaning here, never a likely one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ..errors import UnknownModelError
from .attention import (
    KIND_OF_NAME,
    has_indexer,
    head_dim,
    index_keys,
    key_values,
    latent,
    listed_kinds,
    num_layers,
    window_of,
)
from .caches import Layer, LayerCache, StateCache
from .fields import MAX_LAYERS, Fields
from .states import (
    delta_attention,
    gated_delta_net,
    lightning,
    mamba1,
    mamba2,
    mamba2_of_hybrid,
    short_convolution,
)


class Layers(NamedTuple):
    """What the layers of a model keep.

    Attributes:
        layers: The model's own.
        drafts: Those that predict further tokens.
        draft_doubt: Why that is not known; else empty.
    """

    layers: Sequence[Layer]
    drafts: Sequence[Layer] = ()
    draft_doubt: str = ""


def _num_draft_layers(fields: Fields) -> int:
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
    return fields.count(*names, minimum=0, maximum=MAX_LAYERS) if fields.has(*names) else 0


def _with_doubtful_drafts(fields: Fields, layers: list[Layer]) -> Layers:
    if _num_draft_layers(fields):
        return Layers(layers, draft_doubt="what its draft layers keep is not known")
    return Layers(layers)


# Plain attention. Configs list the kinds of layers, or their family has a rule.

Rule = Callable[[Fields, int], list[str]]


def _all_full(fields: Fields, layers: int) -> list[str]:
    if fields.has("sliding_window") and fields.flag("use_sliding_window", True):
        raise UnknownModelError(
            "the config has a sliding_window and no layer_types: which layers have it is not known",
            key="layer_types",
        )
    return ["full"] * layers


def _all_windows(fields: Fields, layers: int) -> list[str]:
    return ["window" if fields.has("sliding_window") else "full"] * layers


def _windows_after(fields: Fields, layers: int) -> list[str]:
    """Qwen2 and Qwen3: windows from ``max_window_layers`` on, where they are used at all."""
    if not (fields.flag("use_sliding_window", False) and fields.has("sliding_window")):
        return ["full"] * layers
    first = fields.count("max_window_layers", minimum=0)
    return ["window" if layer >= first else "full" for layer in range(layers)]


def _windows_if_used(fields: Fields, layers: int) -> list[str]:
    """Other Qwens: windows only where ``use_sliding_window`` asks, and then it must say where."""
    if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
        return ["full"] * layers
    raise fields.lacking("layer_types")


def _every(step: int) -> Rule:
    """A full layer after every ``step - 1`` with a window; the config may name the step."""

    def kinds(fields: Fields, layers: int) -> list[str]:
        period = fields.count_or(step, "sliding_window_pattern")
        return ["full" if (layer + 1) % period == 0 else "window" for layer in range(layers)]

    return kinds


def _exaone(fields: Fields, layers: int) -> list[str]:
    if not fields.has("sliding_window"):
        return ["full"] * layers
    pattern = fields.raw("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        if set(pattern) - set("LG"):
            raise fields.refuse("sliding_window_pattern", "a number, or a text of L and G")
        kinds = [
            "window" if pattern[layer % len(pattern)] == "L" else "full" for layer in range(layers)
        ]
        return [*kinds[:-1], "full"]
    return _every(fields.count("sliding_window_pattern"))(fields, layers)


def _chunks(fields: Fields, layers: int) -> list[str]:
    """Llama 4: layers with rotary positions see their chunk, the others all tokens."""
    if not fields.has("attention_chunk_size"):
        return ["full"] * layers
    listed = fields.per_layer("no_rope_layers", 0, layers, known={0: "full", 1: "chunk"})
    if listed:
        return listed
    step = fields.count_or(4, "no_rope_layer_interval")
    return ["full" if (layer + 1) % step == 0 else "chunk" for layer in range(layers)]


def _only_listed(fields: Fields, layers: int) -> list[str]:
    raise fields.lacking("layer_types")


class _Plain(NamedTuple):
    """How a family of plain attention is read.

    Attributes:
        rule: The kinds of layers where the config does not list them.
        all_heads: Whether a config without key-value heads means all heads.
        own_head_dim: Whether a config without ``head_dim`` means the hidden size divided
            by the heads; otherwise the family's own default is not guessed.
        drafts: The kind of its draft layers, where that is known.
    """

    rule: Rule = _all_full
    all_heads: bool = False
    own_head_dim: bool = True
    drafts: str = ""


_GEMMA = _Plain(_every(2), own_head_dim=False)
_PLAIN: Mapping[str, _Plain] = {
    **dict.fromkeys(
        (
            *("llama", "granite", "granitemoe", "granitemoeshared", "olmo", "olmo2", "olmoe"),
            *("flex_olmo", "phi", "cohere", "hunyuan_v1_dense", "hunyuan_v1_moe", "apertus"),
            *("arcee", "nemotron", "jais2", "persimmon", "gpt_neox"),
        ),
        _Plain(all_heads=True),
    ),
    **dict.fromkeys(
        ("stablelm", "ernie4_5_moe", "bitnet", "qwen3_vl_moe_text", "glm4v_text"), _Plain()
    ),
    **dict.fromkeys(
        (
            *("gemma", "glm", "glm4", "minimax_m2", "seed_oss", "internlm3", "helium", "ernie4_5"),
            *("solar_open", "ministral3", "qwen3_vl_text", "hy_v3", "iquestcoder", "sarvam_moe"),
        ),
        _Plain(own_head_dim=False),
    ),
    "glm4_moe": _Plain(drafts="full"),
    **dict.fromkeys(("mistral", "mixtral", "starcoder2"), _Plain(_all_windows)),
    "phi3": _Plain(_all_windows, all_heads=True),
    "phimoe": _Plain(_all_windows),
    "ministral": _Plain(_all_windows),
    "qwen2": _Plain(_windows_after),
    "qwen3": _Plain(_windows_after, own_head_dim=False),
    # older configs of the VL forms have the language model's keys at the top
    **dict.fromkeys(
        (
            *("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
            "qwen2_5_omni_text",
        ),
        _Plain(_windows_after),
    ),
    "qwen2_moe": _Plain(_windows_if_used),
    "qwen3_moe": _Plain(_windows_if_used),
    "qwen3_omni_moe_text": _Plain(_windows_if_used),
    "smollm3": _Plain(_windows_if_used),
    "gpt_oss": _Plain(_every(2), own_head_dim=False),
    "gemma2": _GEMMA,
    "vaultgemma": _GEMMA,
    "cohere2": _Plain(_every(4), all_heads=True),
    "olmo3": _Plain(_every(4), all_heads=True),
    "exaone4": _Plain(_exaone),
    "llama4_text": _Plain(_chunks, own_head_dim=False),
    **dict.fromkeys(
        ("exaone_moe", "dots1", "granite_swa"),
        _Plain(_only_listed),
    ),
    "granitemoe_swa": _Plain(_only_listed, all_heads=True),
    **dict.fromkeys(
        ("afmoe", "cwm", "laguna", "mellum", "cohere2_moe"),
        _Plain(_only_listed, own_head_dim=False),
    ),
}


def _plain(fields: Fields, family: _Plain) -> Layers:
    count = num_layers(fields)
    kinds = listed_kinds(fields, count)
    if kinds is None:
        kinds = family.rule(fields, count)
    if not family.own_head_dim:
        fields.count("head_dim")
    layers = [_attention(fields, kind, all_heads=family.all_heads) for kind in kinds]
    if not family.drafts:
        return _with_doubtful_drafts(fields, layers)
    draft = _attention(fields, family.drafts, all_heads=family.all_heads)
    return Layers(layers, [draft] * _num_draft_layers(fields))


def _attention(fields: Fields, kind: str, *, all_heads: bool = False) -> Layer:
    if kind not in ("full", "window", "chunk"):
        raise UnknownModelError(
            f"layer_types has a layer of kind {kind}, which this family is not known to have",
            key="layer_types",
        )
    return (key_values(fields, window_of(fields, kind), all_heads=all_heads),)


def _gemma3(fields: Fields) -> Layers:
    """Gemma 3: published configs leave out the sizes that transformers has as defaults."""
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    return _plain(fields.with_defaults(defaults), _Plain(_every(6), own_head_dim=False))


def _gemma_with_shared_layers(fields: Fields) -> Layers:
    """Gemma 3n and 4: the last layers read the keys of earlier ones, and keep none."""
    count = num_layers(fields)
    kinds = listed_kinds(fields, count)
    if kinds is None:
        raise fields.lacking("layer_types")
    own = count - fields.count_or(0, "num_kv_shared_layers", minimum=0)
    if own < 1:
        raise fields.refuse("num_kv_shared_layers", f"less than {count}")
    is_fourth = fields.text("model_type") == "gemma4_text"
    layers: list[Layer] = []
    for kind in kinds[:own]:
        if is_fourth and kind == "full":
            heads: tuple[str, ...] = ("num_key_value_heads",)
            if fields.flag("attention_k_eq_v", False):
                heads = ("num_global_key_value_heads", *heads)
            layers.append((key_values(fields, heads=heads, dims=("global_head_dim",)),))
        else:
            layers.append(_attention(fields, kind))
    return Layers(layers + [()] * (count - own))


def _mimo(fields: Fields) -> Layers:
    """MiMo-V2: windows and full layers differ in their heads."""
    count = num_layers(fields)
    kinds = listed_kinds(fields, count)
    if kinds is None:
        kinds = fields.per_layer("hybrid_layer_pattern", count, known={0: "full", 1: "window"})
    if kinds is None:
        raise fields.lacking("layer_types", "hybrid_layer_pattern")
    if fields.has("sliding_window_size"):
        window = fields.count("sliding_window_size") + 1
    else:
        window = fields.count("sliding_window")
    fields.count("head_dim")
    full = key_values(fields, value_dims=("v_head_dim",))
    sliding = key_values(
        fields,
        window,
        dims=("swa_head_dim",),
        value_dims=("swa_v_head_dim", "v_head_dim"),
    )
    # twice the heads of full layers, where the config does not say
    heads = fields.count_or(2 * full.num_heads, "swa_num_key_value_heads")
    sliding = replace(sliding, num_heads=heads)
    of_kind: dict[str, Layer] = {"full": (full,), "window": (sliding,)}
    return _with_doubtful_drafts(fields, _of_kinds(fields, kinds, of_kind))


def _step(fields: Fields) -> Layers:
    """Step 3.5: ``layer_types`` lists the draft layers too."""
    count, drafts = num_layers(fields), _num_draft_layers(fields)
    kinds = listed_kinds(fields, count, count + drafts) or ["full"] * (count + drafts)
    heads = ("num_key_value_heads", "num_attention_groups")
    setting = fields.inside("attention_other_setting")
    if setting.has("num_attention_groups", "head_dim"):
        same = setting.count("num_attention_groups") == fields.count(*heads)
        if not same or setting.count("head_dim") != fields.count("head_dim"):
            raise UnknownModelError(
                "attention_other_setting: layers with other key-value heads are not known",
                key="attention_other_setting",
            )
    fields.count("head_dim")
    layers: list[Layer] = [
        (key_values(fields, window_of(fields, kind), heads=heads),) for kind in kinds
    ]
    if drafts and len(layers) == count:
        return Layers(layers, draft_doubt="layer_types does not list its draft layers")
    return Layers(layers[:count], layers[count:])


# Latents.


def _latents(fields: Fields) -> Layers:
    layer: Layer = (latent(fields),)
    drafts = [layer] * _num_draft_layers(fields)
    return Layers([layer] * num_layers(fields), drafts)


def _two_latents(fields: Fields) -> Layers:
    """LongCat-Flash: each layer has two attentions."""
    layer: Layer = (latent(fields),)
    layers = [layer] * (2 * fields.count("num_layers", maximum=MAX_LAYERS // 2))
    return _with_doubtful_drafts(fields, layers)


def _indexed(fields: Fields) -> Layers:
    """DeepSeek-V3.2 and GLM-5: a latent, and index keys where a layer has its own indexer."""
    count = num_layers(fields)
    kinds = listed_kinds(fields, count) or ["indexed"] * count
    if set(kinds) != {"indexed"}:
        raise UnknownModelError(
            f"layer_types has layers of kinds {sorted(set(kinds))}; of this family only layers "
            "with an indexer are known",
            key="layer_types",
        )
    full: Layer = (latent(fields), index_keys(fields))
    own = [True] * count
    family = fields.text("model_type")
    if family == "hy_v4" and not fields.has("indexer_types"):
        raise fields.lacking("indexer_types")
    if family in ("glm_moe_dsa", "hy_v4"):
        own = has_indexer(fields, count)
    layers: list[Layer] = [full if has else full[:1] for has in own]
    return Layers(layers, [full] * _num_draft_layers(fields))


# States, alone and beside attention.


def _of_kinds(
    fields: Fields, kinds: Iterable[str], of_kind: Mapping[str, Layer], key: str = "layer_types"
) -> list[Layer]:
    layers = []
    for kind in kinds:
        if kind not in of_kind:
            raise UnknownModelError(
                f"{key} has a layer of kind {kind}; this family is known to have "
                f"{', '.join(sorted(of_kind))}",
                key=key,
            )
        layers.append(of_kind[kind])
    return layers


def _mixed(
    fields: Fields, kinds: list[str] | None, attention: LayerCache, state: StateCache
) -> list[Layer]:
    if kinds is None:
        raise fields.lacking("layer_types")
    return _of_kinds(
        fields, kinds, {"full": (attention,), "state": (state,), "both": (attention, state)}
    )


def _gated_delta(fields: Fields) -> Layers:
    """Qwen3-Next and Qwen3.5."""
    count = num_layers(fields)
    kinds = listed_kinds(fields, count)
    if kinds is None:
        step = fields.count("full_attention_interval")
        kinds = ["full" if (layer + 1) % step == 0 else "state" for layer in range(count)]
    fields.count("head_dim")
    attention = key_values(fields)
    layers = _mixed(fields, kinds, attention, gated_delta_net(fields))
    return Layers(layers, [(attention,)] * _num_draft_layers(fields))


def _olmo_hybrid(fields: Fields) -> Layers:
    kinds = listed_kinds(fields, num_layers(fields))
    attention = key_values(fields, all_heads=True)
    return _with_doubtful_drafts(fields, _mixed(fields, kinds, attention, gated_delta_net(fields)))


def _kimi_linear(fields: Fields) -> Layers:
    count, linear = num_layers(fields), fields.inside("linear_attn_config")
    kinds = listed_kinds(fields, count)
    if kinds is None:
        full = linear.indices("full_attn_layers", count, first=1)
        state = linear.indices("kda_layers", count, first=1)
        if full & state or len(full) + len(state) != count:
            raise UnknownModelError(
                f"linear_attn_config: full_attn_layers and kda_layers must name each of {count} "
                "layers once",
                key="linear_attn_config",
            )
        kinds = ["full" if layer in full else "state" for layer in range(count)]
    if fields.has("linear_num_heads"):
        state_cache = delta_attention(
            fields.count("linear_num_heads"),
            fields.count("linear_head_dim"),
            fields.count("linear_conv_kernel_dim"),
        )
    else:
        state_cache = delta_attention(
            linear.count("num_heads"),
            linear.count("head_dim"),
            linear.count("short_conv_kernel_size"),
        )
    return _with_doubtful_drafts(fields, _mixed(fields, kinds, latent(fields), state_cache))


def _bailing_hybrid(fields: Fields) -> Layers:
    """Ling 2.5: Kimi's delta attention between layers of MLA."""
    count = num_layers(fields)
    kinds = listed_kinds(fields, count)
    if kinds is None:
        step = fields.count("layer_group_size")
        kinds = ["full" if (layer + 1) % step == 0 else "state" for layer in range(count)]
    state = delta_attention(
        fields.count("num_attention_heads"),
        fields.count("head_dim"),
        fields.count("short_conv_kernel_size"),
    )
    return _with_doubtful_drafts(fields, _mixed(fields, kinds, latent(fields), state))


def _minimax(fields: Fields) -> Layers:
    """MiniMax-01 and M1: lightning attention between full layers."""
    count = num_layers(fields)
    kinds = listed_kinds(fields, count)
    if kinds is None:
        kinds = fields.per_layer("attn_type_list", count, known={0: "state", 1: "full"})
    if kinds is None:
        raise fields.lacking("layer_types", "attn_type_list")
    state = lightning(fields.count("num_attention_heads"), head_dim(fields))
    return _with_doubtful_drafts(fields, _mixed(fields, kinds, key_values(fields), state))


def _short_convolutions(fields: Fields) -> Layers:
    """LFM2."""
    count = num_layers(fields)
    kinds = listed_kinds(fields, count)
    if kinds is None and fields.has("full_attn_idxs"):
        full = fields.indices("full_attn_idxs", count)
        kinds = ["full" if layer in full else "state" for layer in range(count)]
    layers = _mixed(fields, kinds, key_values(fields), short_convolution(fields))
    return Layers(layers)


def _mamba1(fields: Fields) -> Layers:
    return Layers([(mamba1(fields, prefix=""),)] * num_layers(fields))


def _mamba2(fields: Fields) -> Layers:
    state = mamba2(
        fields,
        heads=("num_heads",),
        dims=("head_dim",),
        sizes=("state_size",),
        groups=("n_groups",),
        kernels=("conv_kernel",),
    )
    return Layers([(state,)] * num_layers(fields))


def _mamba_ssm(fields: Fields) -> Layers:
    """The format of the mamba_ssm package, whose configs name only what is not its default."""
    ssm = fields.inside("ssm_cfg")
    count, kind = fields.count("n_layer", maximum=MAX_LAYERS), ssm.text("layer") or "Mamba1"
    if fields.raw("attn_layer_idx") not in (None, []):
        raise UnknownModelError(
            "attn_layer_idx: Mamba layers mixed with attention are not known in this format",
            key="attn_layer_idx",
        )
    channels = ssm.count_or(2, "expand") * fields.count("d_model")
    taps = ssm.count_or(4, "d_conv") - 1
    if kind == "Mamba1":
        state = StateCache(
            state_shape=(channels, ssm.count_or(16, "d_state")),
            conv_parts=((channels, 1),),
            conv_taps=taps,
        )
    elif kind == "Mamba2":
        size, dim = ssm.count_or(128, "d_state"), ssm.count_or(64, "headdim")
        if channels % dim:
            raise ssm.refuse("headdim", f"a divisor of {channels}")
        state = StateCache(
            state_shape=(channels // dim, dim, size),
            conv_parts=((channels // dim, dim), (ssm.count_or(1, "ngroups"), 2 * size)),
            conv_taps=taps,
        )
    else:
        raise ssm.refuse("layer", "Mamba1 or Mamba2")
    return Layers([(state,)] * count)


def _jamba(fields: Fields) -> Layers:
    count = num_layers(fields)
    kinds = listed_kinds(fields, count)
    if kinds is None:
        step = fields.count("attn_layer_period")
        offset = fields.count("attn_layer_offset", minimum=0)
        kinds = ["full" if layer % step == offset else "state" for layer in range(count)]
    return Layers(_mixed(fields, kinds, key_values(fields), mamba1(fields)))


def _bamba(fields: Fields) -> Layers:
    count = num_layers(fields)
    kinds = listed_kinds(fields, count)
    if kinds is None:
        full = fields.indices("attn_layer_indices", count)
        if not full:
            raise fields.lacking("attn_layer_indices")
        kinds = ["full" if layer in full else "state" for layer in range(count)]
    return Layers(_mixed(fields, kinds, key_values(fields), mamba2_of_hybrid(fields)))


def _granite_hybrid(fields: Fields) -> Layers:
    count = num_layers(fields)
    kinds = listed_kinds(fields, count)
    attention = key_values(fields, all_heads=True)
    if kinds is not None and set(kinds) == {"full"}:
        return Layers([(attention,)] * count)
    return Layers(_mixed(fields, kinds, attention, mamba2_of_hybrid(fields)))


def _falcon_h1(fields: Fields) -> Layers:
    if fields.has("attn_layer_indices"):
        raise UnknownModelError(
            "attn_layer_indices: Falcon-H1 with attention in some layers only is not known",
            key="attn_layer_indices",
        )
    layer: Layer = (key_values(fields), mamba2_of_hybrid(fields))
    return Layers([layer] * num_layers(fields))


_NEMOTRON_LETTERS: Mapping[object, str] = {"M": "state", "*": "full", "-": "none", "E": "none"}


def _nemotron_h(fields: Fields) -> Layers:
    kinds = listed_kinds(fields)
    key = "layers_block_type"
    if kinds is None:
        key = "hybrid_override_pattern"
        kinds = fields.per_layer(key, known=_NEMOTRON_LETTERS)
    if kinds is None:
        raise fields.lacking("layers_block_type", "hybrid_override_pattern")
    count = fields.count_or(len(kinds), "num_hidden_layers")
    if count != len(kinds):
        raise fields.refuse("num_hidden_layers", f"the {len(kinds)} layers that {key} lists")
    attention = key_values(fields, dims=("attention_head_dim",))
    state = mamba2(
        fields,
        heads=("mamba_num_heads",),
        dims=("mamba_head_dim",),
        sizes=("ssm_state_size",),
        groups=("n_groups",),
        kernels=("conv_kernel",),
    )
    of_kind: dict[str, Layer] = {"full": (attention,), "state": (state,), "none": ()}
    layers = _of_kinds(fields, kinds, of_kind, key)
    return _nemotron_drafts(fields, layers, of_kind)


def _nemotron_drafts(fields: Fields, layers: list[Layer], of_kind: Mapping[str, Layer]) -> Layers:
    num_drafts = _num_draft_layers(fields)
    if not num_drafts:
        return Layers(layers)
    for key, known in (
        ("mtp_layers_block_type", KIND_OF_NAME),
        ("mtp_hybrid_override_pattern", _NEMOTRON_LETTERS),
    ):
        kinds = fields.per_layer(key, known=known)
        if kinds is not None and num_drafts == 1:
            return Layers(layers, _of_kinds(fields, kinds, of_kind, key))
    return Layers(layers, draft_doubt="what its draft layers keep is not known")


def _zamba2(fields: Fields) -> Layers:
    """Zamba2: a shared attention block before some of the Mamba2 layers, with its own cache."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if not fields.has("attention_head_dim") and 2 * hidden % heads:
        raise fields.lacking("attention_head_dim")
    dim = fields.count_or(2 * hidden // heads, "attention_head_dim")
    attention = replace(key_values(fields, all_heads=True), key_dim=dim, value_dim=dim)
    state = mamba2(
        fields,
        heads=("n_mamba_heads",),
        dims=("mamba_headdim",),
        sizes=("mamba_d_state",),
        groups=("mamba_ngroups",),
        kernels=("mamba_d_conv",),
        expands=("mamba_expand",),
    )
    return Layers(_mixed(fields, listed_kinds(fields, num_layers(fields)), attention, state))


FAMILIES: Mapping[str, Callable[[Fields], Layers]] = {
    **{name: partial(_plain, family=family) for name, family in _PLAIN.items()},
    "gemma3_text": _gemma3,
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), _gemma_with_shared_layers),
    "mimo_v2_flash": _mimo,
    "step3p5": _step,
    **dict.fromkeys(
        [
            "deepseek_v2",
            "deepseek_v3",
            "kimi_k2",
            "minicpm3",
            "glm4_moe_lite",
            "youtu",
            "axk1",
            "mistral4",
            "sarvam_mla",
        ],
        _latents,
    ),
    "longcat_flash": _two_latents,
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"), _indexed),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        _gated_delta,
    ),
    "olmo_hybrid": _olmo_hybrid,
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _bailing_hybrid,
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), _minimax),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_convolutions),
    **dict.fromkeys(("mamba", "falcon_mamba"), _mamba1),
    "mamba2": _mamba2,
    "mamba_ssm": _mamba_ssm,
    "jamba": _jamba,
    "bamba": _bamba,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
}
"""How each family's layers are read, by ``model_type``."""
