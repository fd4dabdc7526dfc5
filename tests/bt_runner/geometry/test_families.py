"""A config becomes what its layers keep; what is not known, or missing, is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from tests.support import model_configs
from tests.support.model_configs import Config

from bt_runner.errors import BadInputError
from bt_runner.geometry.caches import IndexCache, KeyValueCache, LatentCache, StateCache
from bt_runner.geometry.families import read_geometry
from bt_runner.models.checkpoint.fields import Fields

LATENT = LatentCache(lora_rank=512, rope_dim=64)
INDEX = IndexCache(head_dim=128)


def _fields(config: Config) -> Fields:
    return Fields.of(config, "config.json")


def _kept(config: Config) -> Counter[object]:
    return Counter(cache for layer in read_geometry(_fields(config)).layers for cache in layer)


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        pytest.param(model_configs.deepseek_v2_lite, {LATENT: 27}, id="deepseek-v2-lite"),
        pytest.param(model_configs.deepseek_v3, {LATENT: 61}, id="deepseek-v3"),
        pytest.param(model_configs.deepseek_v32, {LATENT: 61, INDEX: 61}, id="deepseek-v3.2"),
        pytest.param(model_configs.glm_5, {LATENT: 78, INDEX: 78}, id="glm-5"),
        pytest.param(model_configs.glm_5_2, {LATENT: 78, INDEX: 21}, id="glm-5.2"),
        pytest.param(
            model_configs.nemotron_h_8b,
            {
                KeyValueCache(num_heads=8, head_dim=128): 4,
                StateCache(
                    num_heads=128, head_dim=64, state_size=128, num_groups=8, conv_kernel=4
                ): 24,
            },
            id="nemotron-h-8b",
        ),
        pytest.param(
            model_configs.falcon_h1,
            {
                KeyValueCache(num_heads=2, head_dim=64): 36,
                StateCache(
                    num_heads=24, head_dim=64, state_size=128, num_groups=1, conv_kernel=4
                ): 36,
            },
            id="falcon-h1",
        ),
        pytest.param(
            model_configs.mamba2,
            {
                StateCache(
                    num_heads=80, head_dim=64, state_size=128, num_groups=1, conv_kernel=4
                ): 64
            },
            id="mamba2",
        ),
    ],
)
def test_each_family_keeps_what_it_is_known_to_keep(
    config: Callable[[], Config], kept: dict[object, int]
) -> None:
    assert _kept(config()) == kept


def test_nemotron_layers_may_be_listed_by_name() -> None:
    config = model_configs.nemotron_h_8b()
    del config["hybrid_override_pattern"], config["num_hidden_layers"]
    config["layers_block_type"] = ["mamba", "moe", "attention", "mlp", "mamba"]

    kinds = [
        tuple(type(cache) for cache in layer) for layer in read_geometry(_fields(config)).layers
    ]

    assert kinds == [(StateCache,), (), (KeyValueCache,), (), (StateCache,)]


def test_how_weights_are_stored_does_not_matter_to_the_cache() -> None:
    config = {**model_configs.deepseek_v32(), "quantization_config": {"quant_method": "fp8"}}

    assert _kept(config) == _kept(model_configs.deepseek_v32())


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
    ],
)
def test_a_missing_key_is_named(config: Callable[[], Config], key: str) -> None:
    lacking = config()
    del lacking[key]

    with pytest.raises(BadInputError, match=key):
        read_geometry(_fields(lacking))


def test_an_unknown_family_is_named_beside_the_known_ones() -> None:
    with pytest.raises(BadInputError, match=r"jamba.*nemotron_h"):
        read_geometry(_fields({"model_type": "jamba"}))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        pytest.param({"hybrid_override_pattern": "M" * 51 + "X"}, "unknown kinds", id="letter"),
        pytest.param({"hybrid_override_pattern": "M*"}, "2 layers.*52", id="too-few"),
    ],
)
def test_layers_that_are_not_understood_are_refused(changed: Config, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        read_geometry(_fields({**model_configs.nemotron_h_8b(), **changed}))


def test_attention_in_some_layers_of_falcon_h1_is_refused() -> None:
    with pytest.raises(BadInputError, match="attn_layer_indices"):
        read_geometry(_fields({**model_configs.falcon_h1(), "attn_layer_indices": [1, 3]}))
