"""A config becomes what its layers keep; what is not certain is refused, and the key is named."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.support import model_configs
from tests.support.model_configs import Config
from tests.support.speed import slowness

from bt_width import (
    BlockTableError,
    InvalidSpecError,
    ModelCaches,
    UnknownModelError,
    read_model,
)
from bt_width.models.caches import IndexCache, KeyValueCache, LatentCache, LayerCache, StateCache

pytestmark = pytest.mark.fast

LATENT = LatentCache(lora_rank=512, rope_dim=64)
INDEX = IndexCache(head_dim=128)
LLAMA: Config = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def heads(num_heads: int, dim: int, window: int | None = None) -> KeyValueCache:
    """Attention whose values are as large as its keys."""
    return KeyValueCache(num_heads=num_heads, key_dim=dim, value_dim=dim, window=window)


def mamba2_state(num_heads: int, dim: int, size: int, groups: int) -> StateCache:
    """Mamba2 with a convolution of four taps."""
    return StateCache(
        state_shape=(num_heads, dim, size),
        conv_parts=((num_heads, dim), (groups, 2 * size)),
        conv_taps=3,
    )


def kept(config: Config) -> Counter[LayerCache]:
    """How many layers keep what."""
    return Counter(cache for layer in read_model(config).layers for cache in layer)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(model_configs.deepseek_v2_lite, {LATENT: 27}, id="deepseek-v2-lite"),
        pytest.param(model_configs.deepseek_v3, {LATENT: 61}, id="deepseek-v3"),
        pytest.param(model_configs.deepseek_v32, {LATENT: 61, INDEX: 61}, id="deepseek-v3.2"),
        pytest.param(model_configs.glm_5, {LATENT: 78, INDEX: 78}, id="glm-5"),
        pytest.param(model_configs.glm_5_2, {LATENT: 78, INDEX: 21}, id="glm-5.2"),
        pytest.param(
            model_configs.nemotron_h_8b,
            {heads(8, 128): 4, mamba2_state(128, 64, 128, 8): 24},
            id="nemotron-h-8b",
        ),
        pytest.param(
            model_configs.falcon_h1,
            {heads(2, 64): 36, mamba2_state(24, 64, 128, 1): 36},
            id="falcon-h1",
        ),
        pytest.param(model_configs.mamba2, {mamba2_state(80, 64, 128, 1): 64}, id="mamba2"),
        pytest.param(lambda: LLAMA, {heads(8, 128): 32}, id="llama"),
    ],
)
def test_each_family_keeps_what_it_is_known_to_keep(
    config: Callable[[], Config], expected: dict[LayerCache, int]
) -> None:
    assert kept(config()) == expected


@pytest.mark.parametrize(
    ("wrapper", "key"), [("kimi_k25", "text_config"), ("deepseek_vl_v2", "language_config")]
)
def test_the_language_model_of_a_multimodal_config_is_entered(wrapper: str, key: str) -> None:
    text = model_configs.deepseek_v3()

    model = read_model({"model_type": wrapper, key: text, "vision_config": {"hidden_size": 3}})

    assert model == read_model(text)


def test_a_language_model_may_lie_two_configs_deep() -> None:
    config = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": LLAMA}}

    assert read_model(config) == read_model(LLAMA)


def test_a_config_that_is_nested_on_and_on_is_refused_at_once() -> None:
    config: Config = dict(LLAMA)
    for _ in range(100_000):
        config = {"text_config": config}
    started = time.process_time()

    with pytest.raises(UnknownModelError, match="model_type"):
        read_model(config)
    assert time.process_time() - started < 1 * slowness()
    while "text_config" in config:  # a list of such depth cannot be freed in one go
        config = config["text_config"]  # type: ignore[assignment]  # it is a Config


def test_a_renamed_kin_of_deepseek_is_read_by_its_keys() -> None:
    assert kept({**model_configs.deepseek_v3(), "model_type": "kimi_k2"}) == {LATENT: 61}


def test_the_older_mamba_format_has_the_defaults_of_its_package() -> None:
    config: Config = {"d_model": 2560, "n_layer": 64, "ssm_cfg": {"layer": "Mamba2"}}

    assert kept(config) == kept(model_configs.mamba2())


def test_layers_that_share_a_cache_keep_nothing() -> None:
    config: Config = {
        **LLAMA,
        "model_type": "gemma3n_text",
        "head_dim": 256,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 512,
        "num_kv_shared_layers": 2,
    }

    assert kept(config) == {heads(8, 256): 2, heads(8, 256, 512): 2}
    assert read_model(config).layers[4:] == ((), ())


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        ({"indexer_types": ["full", "shared", "shared", "full"]}, "FSSF"),
        ({"indexer_types": "FSSF"}, "FSSF"),
        ({"index_topk_pattern": "FSSF"}, "FSSF"),
        ({"index_topk_pattern": ["full", "shared", "full", "shared"]}, "FSFS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFS"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFS"),
        ({"layer_types": ["deepseek_sparse_attention"] * 4}, "FFFF"),
        ({"layer_types": ["indexed_attention"] * 4}, "FFFF"),
        ({}, "FFFF"),
    ],
    ids=str,
)
def test_every_spelling_of_glms_indexers_is_read(keys: Config, pattern: str) -> None:
    model = read_model({**model_configs.glm_5(), "num_hidden_layers": 4, **keys})

    assert "".join("F" if INDEX in layer else "S" for layer in model.layers) == pattern


@pytest.mark.parametrize(
    ("keys", "full", "windowed"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 0, 8),
        ({"model_type": "mistral", "sliding_window": None}, 8, 0),
        ({"model_type": "qwen2", "sliding_window": 4096}, 8, 0),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            3,
            5,
        ),
        ({"model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128}, 4, 4),
        ({"model_type": "gemma2", "head_dim": 64, "sliding_window": 128}, 4, 4),
        ({"model_type": "gemma3_text", "head_dim": 64, "sliding_window": 128}, 1, 7),
        ({"model_type": "cohere2", "sliding_window": 128}, 2, 6),
        (
            {"model_type": "exaone4", "sliding_window": 128, "sliding_window_pattern": "LLLG"},
            2,
            6,
        ),
        ({"model_type": "exaone4", "sliding_window": 128, "sliding_window_pattern": 4}, 2, 6),
        ({"model_type": "llama4_text", "head_dim": 64, "attention_chunk_size": 128}, 2, 6),
        (
            {
                "model_type": "llama4_text",
                "head_dim": 64,
                "attention_chunk_size": 128,
                "no_rope_layers": [1, 1, 1, 1, 1, 1, 0, 0],
            },
            2,
            6,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_each_familys_rule_of_windows(keys: Config, full: int, windowed: int) -> None:
    windows = [
        cache.window
        for layer in read_model({**LLAMA, "num_hidden_layers": 8, **keys}).layers
        for cache in layer
        if isinstance(cache, KeyValueCache)
    ]

    assert (windows.count(None), len(windows) - windows.count(None)) == (full, windowed)


DRAFTS: list[Any] = [
    pytest.param(
        {**model_configs.glm_5_2(), "num_nextn_predict_layers": 1}, [(LATENT, INDEX)], id="glm-5.2"
    ),
    pytest.param(
        {**model_configs.deepseek_v3(), "num_nextn_predict_layers": 1}, [(LATENT,)], id="deepseek"
    ),
    pytest.param(
        {
            **model_configs.nemotron_h_8b(),
            "num_nextn_predict_layers": 1,
            "mtp_hybrid_override_pattern": "*E",
        },
        [(heads(8, 128),), ()],
        id="nemotron",
    ),
    pytest.param(
        {
            **model_configs.nemotron_h_8b(),
            "num_nextn_predict_layers": 1,
            "mtp_layers_block_type": ["attention", "moe"],
        },
        [(heads(8, 128),), ()],
        id="nemotron-by-name",
    ),
]


@pytest.mark.parametrize(("config", "drafts"), DRAFTS)
def test_draft_layers_are_told_apart(config: Config, drafts: list[Any]) -> None:
    model = read_model(config)

    assert list(model.draft_layers) == drafts
    assert len(model.layers) == config["num_hidden_layers"]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        pytest.param(model_configs.deepseek_v2_lite, "kv_lora_rank", id="deepseek-v2"),
        pytest.param(model_configs.deepseek_v32, "index_head_dim", id="deepseek-v3.2"),
        pytest.param(model_configs.glm_5_2, "qk_rope_head_dim", id="glm-5.2"),
        pytest.param(model_configs.nemotron_h_8b, "ssm_state_size", id="nemotron-h"),
        pytest.param(model_configs.nemotron_h_8b, "hybrid_override_pattern", id="nemotron-layers"),
        pytest.param(model_configs.falcon_h1, "mamba_n_heads", id="falcon-h1"),
        pytest.param(model_configs.mamba2, "state_size", id="mamba2"),
        pytest.param(model_configs.mamba2, "model_type", id="no-family"),
        pytest.param(lambda: dict(LLAMA), "num_hidden_layers", id="no-layers"),
        pytest.param(lambda: {**LLAMA, "model_type": "glm4_moe"}, "num_key_value_heads", id="glm"),
    ],
)
def test_a_missing_key_is_named(config: Callable[[], Config], key: str) -> None:
    lacking = config()
    del lacking[key]

    with pytest.raises(UnknownModelError, match=key):
        read_model(lacking)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param({"model_type": "made_up"}, "made_up", id="family"),
        pytest.param({**LLAMA, "sliding_window": 4096}, "sliding_window", id="window-somewhere"),
        pytest.param({**LLAMA, "is_encoder_decoder": True}, "cross-attention", id="encoder"),
        pytest.param({**LLAMA, "add_cross_attention": True}, "cross-attention", id="cross"),
        pytest.param(
            {"model_type": "mllama", "text_config": {"cross_attention_layers": [3]}},
            "cross_attention_layers",
            id="cross-layers",
        ),
        pytest.param(
            {"model_type": "deepseek_v4", "compress_ratios": [0, 4, 128]},
            "compress_ratios",
            id="compressed",
        ),
        pytest.param(
            {**model_configs.glm_5(), "index_kpool": 16}, "index_kpool", id="pooled-index-keys"
        ),
        pytest.param(
            {**LLAMA, "layer_types": ["full_attention", "quantum_attention"] * 16},
            "quantum_attention",
            id="layer-kind",
        ),
        pytest.param(
            {**LLAMA, "layer_types": ["full_attention", "linear_attention"] * 16},
            "state",
            id="state-in-llama",
        ),
        pytest.param(
            {**LLAMA, "num_attention_heads": 33, "num_key_value_heads": 3}, "head_dim", id="heads"
        ),
        pytest.param(
            {**model_configs.falcon_h1(), "attn_layer_indices": [1, 3]},
            "attn_layer_indices",
            id="falcon-h1-layers",
        ),
        pytest.param(
            {**model_configs.nemotron_h_8b(), "hybrid_override_pattern": "M" * 51 + "X"},
            "'X'",
            id="nemotron-letter",
        ),
        pytest.param(
            {"model_type": "wrap", "text_config": {}}, "text_config.model_type", id="text"
        ),
    ],
)
def test_what_is_not_certain_is_refused_with_what_is_missing(config: Config, words: str) -> None:
    with pytest.raises(UnknownModelError, match=words):
        read_model(config)


def test_layers_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(InvalidSpecError, match=r"52.*2 layers|num_hidden_layers"):
        read_model({**model_configs.nemotron_h_8b(), "hybrid_override_pattern": "M*"})
    with pytest.raises(InvalidSpecError, match=r"layer_types lists 2 layers.*32"):
        read_model({**LLAMA, "layer_types": ["full_attention"] * 2})


BAD_VALUES: list[Any] = [
    -1, 10**30, 10**4500, float("nan"), float("inf"), 1.0, "8", "x" * 10**6, True, [], [1], {},
    [[[[]]]], {"a": {"b": {}}},
]  # fmt: skip


def read_or_refuse(config: Config) -> tuple[ModelCaches | None, str]:
    """The model, or the words of one of our errors."""
    try:
        return read_model(config), ""
    except BlockTableError as error:
        return None, str(error)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        model_configs.glm_5_2(),
        model_configs.nemotron_h_8b(),
        model_configs.falcon_h1(),
        model_configs.mamba2(),
        model_configs.deepseek_v2_lite(),
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_a_wrong_value_of_any_key_is_refused_by_name_or_not_read(config: Config) -> None:
    """Whatever stands there: one of our errors that names the key, in no time, or no change."""
    right = read_model(config)
    started = time.process_time()
    for key, value in itertools.product(config, BAD_VALUES):
        found, message = read_or_refuse({**config, key: value})
        assert found == right or key in message or key in ("torch_dtype", "dtype")
        assert len(message) < 400
    assert time.process_time() - started < 10 * slowness()


@pytest.mark.parametrize("config", [None, [], "text", 3, b"{}"], ids=repr)
def test_what_is_no_config_is_refused(config: Any) -> None:
    with pytest.raises(InvalidSpecError):
        read_model(config)


def test_many_layers_take_no_time_and_too_many_are_refused() -> None:
    assert len(read_model({**LLAMA, "num_hidden_layers": 10_000}).layers) == 10_000
    with pytest.raises(InvalidSpecError, match="num_hidden_layers"):
        read_model({**LLAMA, "num_hidden_layers": 10_001})


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "fp8_e4m3"),
        ({"kv_cache_scheme": None, "quant_method": "compressed-tensors"}, None),
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        ({"quant_method": "fp8"}, None),
    ],
    ids=str,
)
def test_a_declared_cache_dtype_is_honoured(quantization: Config, dtype: str | None) -> None:
    model = read_model({**LLAMA, "quantization_config": quantization})

    (group,) = model.groups()
    assert model.cache_dtype == dtype
    assert group.token_bytes == {None: 131_072, "fp8_e4m3": 65_536, "nvfp4": 36_864}[dtype]


@pytest.mark.parametrize(
    "quantization",
    [
        {"kv_cache_scheme": {"num_bits": 4, "type": "int"}},
        {"kv_cache_scheme": 8},
        {"kv_cache_quant_algo": "FP5"},
    ],
    ids=json.dumps,
)
def test_a_declared_cache_that_is_not_known_needs_the_option(quantization: Config) -> None:
    model = read_model({**LLAMA, "quantization_config": quantization})

    with pytest.raises(UnknownModelError, match=r"kv_cache_.*--cache-dtype"):
        model.groups()
    assert model.groups(cache_dtype="bfloat16")[0].token_bytes == 131_072
