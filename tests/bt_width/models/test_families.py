"""Which layer keeps what, in families that say it in keys of their own."""

from __future__ import annotations

import pytest
from tests.support import model_configs
from tests.support.model_configs import Config

from bt_width import BlockTableError, UnknownModelError, read_model
from bt_width.models.caches import KeyValueCache, LatentCache, LayerCache, StateCache

pytestmark = pytest.mark.fast

COMMON: Config = {
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
}
MAMBA: Config = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}
MAMBA2: Config = {**MAMBA, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}
DELTA_NET: Config = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def shown(caches: tuple[LayerCache, ...]) -> str:
    """F is full attention, W8 a window of 8, L a latent, S a state; - is nothing."""
    letters = []
    for cache in caches:
        match cache:
            case KeyValueCache(window=None):
                letters.append("F")
            case KeyValueCache(window=window):
                letters.append(f"W{window}")
            case LatentCache():
                letters.append("L")
            case StateCache():
                letters.append("S")
    return "".join(letters) or "-"


def state_of(config: Config) -> StateCache:
    """The one kind of state that a model keeps."""
    (state,) = {
        cache
        for layer in read_model(config).layers
        for cache in layer
        if isinstance(cache, StateCache)
    }
    return state


WINDOWS: Config = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "own", "layers"),
    [
        ("qwen2", {"sliding_window": 8}, "F F F F"),
        ("qwen2", {**WINDOWS, "max_window_layers": 2}, "F F W8 W8"),
        ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 8}, "F F F F"),
        ("olmo3", {"sliding_window": 8, "num_hidden_layers": 8}, "W8 W8 W8 F W8 W8 W8 F"),
        ("gpt_oss", {"sliding_window": 8}, "W8 F W8 F"),
        ("gemma3_text", {"sliding_window": 8, "num_hidden_layers": 7}, "W8 W8 W8 W8 W8 F W8"),
        ("exaone4", {}, "F F F F"),
        (
            "mimo_v2_flash",
            {
                "hybrid_layer_pattern": [0, 1, 1, 0],
                "sliding_window_size": 7,
                "v_head_dim": 16,
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 2,
                "swa_head_dim": 16,
                "swa_v_head_dim": 16,
            },
            "F W8 W8 F",
        ),
        ("jamba", {**MAMBA, "attn_layer_period": 4, "attn_layer_offset": 2}, "S S F S"),
        ("bamba", {**MAMBA2, "attn_layer_indices": [1]}, "S F S S"),
        ("bamba", {**MAMBA2, "attn_layer_indices": [0, 3]}, "F S S F"),
        ("granitemoehybrid", {"layer_types": ["attention"] * 4}, "F F F F"),
        ("lfm2", {"conv_L_cache": 4, "full_attn_idxs": [1, 3]}, "S F S F"),
        ("qwen3_next", {**DELTA_NET, "full_attention_interval": 4}, "S S S F"),
    ],
)
def test_each_layer_keeps_what_its_place_says(family: str, own: Config, layers: str) -> None:
    model = read_model({**COMMON, "model_type": family, "num_hidden_layers": 4, **own})

    assert " ".join(map(shown, model.layers)) == layers


def test_a_layer_of_two_attentions_keeps_two_latents() -> None:
    config = model_configs.deepseek_v3()
    del config["num_hidden_layers"]

    model = read_model({**config, "model_type": "longcat_flash", "num_layers": 3})

    assert " ".join(map(shown, model.layers)) == "L L L L L L"


def test_a_place_past_the_layers_is_refused() -> None:
    config = {**COMMON, **MAMBA2, "model_type": "bamba", "num_hidden_layers": 4}

    for places in ([4], [-1], [0, 1, 2, 3, 3], "01"):
        with pytest.raises(BlockTableError, match=r"attn_layer_indices.*layers in 0\.\.3|list"):
            read_model({**config, "attn_layer_indices": places})


def test_states_of_convolutions_have_their_parts_and_taps() -> None:
    """Queries and keys share heads in a gated delta net; a short convolution has one part."""
    short = {**COMMON, "model_type": "lfm2", "num_hidden_layers": 2, "conv_L_cache": 4}
    delta = {**COMMON, **DELTA_NET, "model_type": "qwen3_next", "num_hidden_layers": 4}

    assert state_of({**short, "full_attn_idxs": [1]}) == StateCache(
        state_shape=(), conv_parts=((64, 1),), conv_taps=3
    )
    assert state_of({**delta, "full_attention_interval": 4}) == StateCache(
        state_shape=(4, 8, 16), conv_parts=((2, 16), (4, 16)), conv_taps=3
    )


def test_delta_attention_shifts_queries_keys_and_values_of_every_head() -> None:
    """One convolution over all three; each layer is named once, counted from 1."""
    kinds = {"full_attn_layers": [2], "kda_layers": [1, 3]}
    sizes = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}
    config: Config = {
        **COMMON,
        "model_type": "kimi_linear",
        "num_hidden_layers": 3,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "linear_attn_config": {**kinds, **sizes},
    }
    twice = {**config, "linear_attn_config": {**kinds, **sizes, "kda_layers": [1, 2]}}

    assert " ".join(map(shown, read_model(config).layers)) == "S L S"
    assert state_of(config) == StateCache(
        state_shape=(4, 16, 16), conv_parts=((4, 48),), conv_taps=3
    )
    with pytest.raises(UnknownModelError, match="layers once"):
        read_model(twice)


def test_the_older_mamba_format_reads_a_mamba1_state() -> None:
    config: Config = {"d_model": 64, "n_layer": 2, "ssm_cfg": {}, "torch_dtype": "bfloat16"}

    assert state_of(config) == StateCache(
        state_shape=(128, 16), conv_parts=((128, 1),), conv_taps=3
    )


def test_zamba2_needs_its_head_size_where_it_does_not_follow() -> None:
    config: Config = {
        **COMMON,
        "model_type": "zamba2",
        "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "num_attention_heads": 3,
    }

    with pytest.raises(UnknownModelError, match="attention_head_dim"):
        read_model(config)
    assert " ".join(map(shown, read_model({**config, "attention_head_dim": 20}).layers)) == "S FS"
