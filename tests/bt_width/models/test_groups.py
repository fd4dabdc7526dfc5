"""Cache groups of a model: their specs, their layers and their bytes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support import model_configs
from tests.support.model_configs import Config

from bt_width import (
    AttentionSpec,
    InvalidSpecError,
    MambaSpec,
    SlidingWindowSpec,
    UniformSpec,
    UnknownModelError,
    read_model,
)

pytestmark = pytest.mark.fast

MIB = 2**20
GEMMA: Config = {
    "model_type": "gemma3_text",
    "torch_dtype": "bfloat16",
    "head_dim": 256,
    "hidden_size": 2560,
    "num_attention_heads": 8,
    "num_hidden_layers": 34,
    "num_key_value_heads": 4,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}


def test_latents_and_index_keys_share_a_table() -> None:
    (group,) = read_model(model_configs.glm_5_2()).groups(block_size=64)

    layer = AttentionSpec(block_size=64)
    assert group.spec == UniformSpec(members={"mla": layer, "indexer": layer})
    assert [(m.name, m.num_layers, m.token_bytes) for m in group.members] == [
        ("mla", 78, 89_856),
        ("indexer", 21, 2_772),
    ]
    assert group.block_bytes == 64 * (89_856 + 2_772)


def test_layers_of_a_window_have_a_table_of_their_own() -> None:
    full, window = read_model(GEMMA).groups(block_size=16)

    assert full.spec == AttentionSpec(block_size=16)
    assert window.spec == SlidingWindowSpec(block_size=16, window=1024)
    assert (full.num_layers, window.num_layers) == (5, 29)
    assert window.token_bytes == 29 * 2 * 4 * 256 * 2


def test_states_are_float32_and_convolutions_have_the_models_dtype() -> None:
    attention, mamba = read_model(model_configs.nemotron_h_8b()).groups(
        cache_dtype="fp8", num_speculative_tokens=3, mamba_mode="align", mamba_block_size=512
    )

    assert mamba.spec == MambaSpec(block_size=512, mode="align", num_speculative_blocks=3)
    (member,) = mamba.members
    assert member.recurrent_bytes == 24 * 4 * MIB
    assert member.conv_bytes == 24 * 10_240 * 3 * 2
    assert attention.token_bytes == 4 * 2048


def test_draft_layers_count_where_drafts_are_on() -> None:
    """Nemotron-3-Super's: 9,216 bytes per token, and 8,192 without."""
    config = {
        **model_configs.nemotron_h_8b(),
        "num_key_value_heads": 2,
        "hybrid_override_pattern": "*M" * 8 + "-" * 36,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    }
    model = read_model(config)

    assert model.groups()[0].token_bytes == 8_192
    assert model.groups(num_speculative_tokens=1)[0].token_bytes == 9_216


def test_draft_layers_that_are_not_known_are_refused_only_where_drafts_are_on() -> None:
    model = read_model({**GEMMA, "num_nextn_predict_layers": 1})

    assert len(model.groups()) == 2
    with pytest.raises(UnknownModelError, match="draft layers"):
        model.groups(num_speculative_tokens=1)


@pytest.mark.parametrize(
    ("tp", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1), (16, 1)], ids=lambda value: str(value)
)
def test_heads_are_divided_and_then_replicated(tp: int, heads: int) -> None:
    full, _ = read_model(GEMMA).groups(tp=tp)

    assert full.token_bytes == 5 * 2 * heads * 256 * 2


def test_latents_are_replicated_and_states_divided() -> None:
    model = read_model(model_configs.glm_5_2())
    assert model.groups(tp=8)[0].token_bytes == model.groups()[0].token_bytes

    (_, state) = read_model(model_configs.nemotron_h_8b()).groups(tp=8)
    assert state.members[0].recurrent_bytes == 24 * 4 * MIB // 8
    assert state.members[0].conv_bytes == 24 * (10_240 // 8) * 3 * 2


@pytest.mark.parametrize(("config", "tp"), [(GEMMA, 3), (model_configs.nemotron_h_8b(), 96)])
def test_ranks_that_cannot_divide_or_share_heads_are_refused(config: Config, tp: int) -> None:
    with pytest.raises(InvalidSpecError, match=str(tp)):
        read_model(config).groups(tp=tp)


@pytest.mark.parametrize(
    ("config", "dtype", "per_layer"),
    [
        pytest.param(model_configs.deepseek_v3(), "bfloat16", 1152, id="mla-bfloat16"),
        pytest.param(model_configs.deepseek_v3(), "float32", 2304, id="mla-float32"),
        pytest.param(model_configs.deepseek_v3(), "fp8", 576, id="mla-fp8"),
        # vLLM: 512 numbers, 4 scales of 4 bytes, 64 numbers of 2
        pytest.param(model_configs.deepseek_v3(), "fp8_ds_mla", 656, id="fp8-ds-mla"),
        pytest.param(GEMMA, "auto", 4096, id="attention-auto"),
        pytest.param(GEMMA, "float16", 4096, id="attention-float16"),
        pytest.param(GEMMA, "float8_e5m2", 2048, id="attention-e5m2"),
        pytest.param(GEMMA, "fp8_e4m3", 2048, id="attention-fp8-e4m3"),
        # 4-bit numbers and an 8-bit scale for 16 of them: 9/16 bytes a number
        pytest.param(GEMMA, "nvfp4", 1152, id="attention-nvfp4"),
    ],
)
def test_bytes_of_a_token_in_a_layer(config: Config, dtype: str, per_layer: int) -> None:
    group = read_model(config).groups(cache_dtype=dtype)[0]

    assert group.token_bytes == group.num_layers * per_layer


def test_index_keys_stay_8_bit_whatever_the_rest_is() -> None:
    for dtype in ("bfloat16", "float32", "fp8_ds_mla"):
        (group,) = read_model(model_configs.glm_5_2()).groups(cache_dtype=dtype)

        assert group.members[1].token_bytes == 21 * 132


@pytest.mark.parametrize(
    ("config", "dtype", "words"),
    [
        pytest.param(GEMMA, "fp8_ds_mla", "fp8_ds_mla", id="latents-only"),
        pytest.param(model_configs.deepseek_v3(), "nvfp4", "nvfp4", id="not-for-latents"),
        pytest.param(
            {**model_configs.deepseek_v3(), "kv_lora_rank": 500}, "fp8_ds_mla", "128", id="scales"
        ),
        pytest.param({**GEMMA, "head_dim": 40}, "nvfp4", "16", id="nvfp4-scales"),
        pytest.param(GEMMA, "int3", "int3", id="of-unknown-size"),
        pytest.param({**GEMMA, "torch_dtype": "int3"}, None, "int3", id="models-own"),
    ],
)
def test_a_format_that_cannot_store_a_cache_is_refused(
    config: Config, dtype: str | None, words: str
) -> None:
    with pytest.raises(InvalidSpecError, match=words):
        read_model(config).groups(cache_dtype=dtype)


def test_a_model_without_a_dtype_needs_one() -> None:
    model = read_model({**GEMMA, "torch_dtype": None})

    with pytest.raises(UnknownModelError, match="dtype"):
        model.groups()
    assert model.groups(model_dtype="bfloat16") == read_model(GEMMA).groups()
    assert model.groups(cache_dtype="bfloat16")[0].token_bytes == 5 * 4096


@pytest.mark.parametrize(
    "wrong",
    [{"block_size": 0}, {"tp": 0}, {"tp": True}, {"num_speculative_tokens": -1}],
    ids=str,
)
def test_a_wrong_argument_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpecError):
        read_model(GEMMA).groups(**wrong)
