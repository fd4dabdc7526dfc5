"""What a ``config.json`` says is understood, or refused with the field that is to blame."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import DEEPSEEK, MAMBA2, write_config

from bt_runner.errors import BadInputError
from bt_runner.models.checkpoint import read_config
from bt_runner.models.checkpoint.fields import MAX_CONFIG_BYTES
from bt_runner.models.config import AttentionLayer, MambaLayer, SelectShared, SelectTopK

NO_LENGTH: dict[str, Any] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "type": "yarn",
}
OLD_YARN: dict[str, Any] = NO_LENGTH | {"original_max_position_embeddings": 4096}


def _first_attention(directory: Path) -> AttentionLayer:
    layer = read_config(directory).layers[0]
    assert isinstance(layer, AttentionLayer)
    return layer


def test_older_files_keep_theta_outside_the_scaling(tmp_path: Path) -> None:
    """``rope_scaling`` with ``type``, and ``rope_theta`` beside it, as DeepSeek published them."""
    write_config(tmp_path, DEEPSEEK, rope_scaling=OLD_YARN, rope_theta=20_000)

    layer = _first_attention(tmp_path)

    assert layer.mla.rope.theta == 20_000
    assert layer.mla.rope.yarn is not None
    assert layer.mla.rope.yarn.factor == 40
    assert isinstance(layer.selection, SelectTopK)
    assert layer.selection.rope.yarn == layer.mla.rope.yarn


@pytest.mark.parametrize(
    ("changes", "interleaved"),
    [
        pytest.param({}, False, id="deepseek"),
        pytest.param({"model_type": "glm_moe_dsa"}, True, id="glm"),
        pytest.param(
            {"model_type": "glm_moe_dsa", "indexer_rope_interleave": False}, False, id="glm-told"
        ),
    ],
)
def test_families_pair_index_dimensions_differently(
    tmp_path: Path, changes: dict[str, Any], interleaved: bool
) -> None:
    """DeepSeek-V3.2 pairs the two halves, GLM neighbours; attention pairs neighbours in both."""
    write_config(tmp_path, DEEPSEEK, **changes)

    layer = _first_attention(tmp_path)

    assert isinstance(layer.selection, SelectTopK)
    assert layer.selection.rope.interleaved is interleaved
    assert layer.mla.rope.interleaved


def test_inner_norms_keep_their_own_epsilon(tmp_path: Path) -> None:
    """The latents' and the index keys' epsilon is 1e-6, whatever ``rms_norm_eps`` says."""
    write_config(tmp_path, DEEPSEEK, rms_norm_eps=1e-3)

    layer = _first_attention(tmp_path)

    assert read_config(tmp_path).norm_eps == 1e-3
    assert layer.mla.latent_norm_eps == 1e-6
    assert isinstance(layer.selection, SelectTopK)
    assert layer.selection.norm_eps == 1e-6


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (7, (7,)), ([7, 8], (7, 8))], ids=["none", "one", "several"]
)
def test_stop_tokens(tmp_path: Path, value: object, expected: tuple[int, ...]) -> None:
    """``eos_token_id`` is a number, a list or missing."""
    write_config(tmp_path, MAMBA2, eos_token_id=value)

    assert read_config(tmp_path).stop_token_ids == expected


@pytest.mark.parametrize("infinity", [float("inf"), {"__float__": "Infinity"}], ids=["json", "hf"])
def test_unlimited_steps_are_written_two_ways(tmp_path: Path, infinity: object) -> None:
    """Infinity is a bare word in old files and an object in new ones."""
    write_config(tmp_path, MAMBA2, time_step_limit=[0.0, infinity])

    assert isinstance(read_config(tmp_path).layers[0], MambaLayer)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("other-family", DEEPSEEK, {"model_type": "llama"}, "llama models are not built here"),
    ("no-family", DEEPSEEK, {"model_type": None}, "model_type must be str, and is None"),
    (
        "quantized",
        DEEPSEEK,
        {"quantization_config": {"quant_method": "fp8"}},
        r"is quantized \('fp8', .* convert it to bfloat16",
    ),
    ("family-first", DEEPSEEK, {"model_type": "gemma", "hidden_act": "gelu"}, "gemma models are"),
    ("no-theta", DEEPSEEK, {"rope_theta": 0}, "rope_theta must be above 0"),
    ("negative-theta", DEEPSEEK, {"rope_theta": -10.0}, "rope_theta must be above 0"),
    ("endless-theta", DEEPSEEK, {"rope_theta": 10**400}, "an int of 1329 bits"),
    ("yarn-factor", DEEPSEEK, {"rope_scaling": OLD_YARN | {"factor": 0}}, "YaRN's factor must be"),
    ("yarn-beta", DEEPSEEK, {"rope_scaling": OLD_YARN | {"beta_fast": -1}}, "YaRN's beta_fast"),
    ("yarn-theta", DEEPSEEK, {"rope_scaling": OLD_YARN, "rope_theta": 1}, "not 1 with YaRN"),
    ("layers", DEEPSEEK, {"num_hidden_layers": 10**7}, "num_hidden_layers must be at most 10,000"),
    ("experts", DEEPSEEK, {"n_routed_experts": 2**21, "n_group": 1}, "2,097,152 experts"),
    ("long-text", DEEPSEEK, {"model_type": "x" * 10**6}, r"^.{0,200}models are not built here"),
    ("activation", DEEPSEEK, {"hidden_act": "gelu"}, "hidden_act is 'gelu', and only 'silu'"),
    ("missing", DEEPSEEK, {"kv_lora_rank": None}, "kv_lora_rank must be int, and is None"),
    ("no-query-latent", DEEPSEEK, {"q_lora_rank": None}, "q_lora_rank must be int"),
    ("text", DEEPSEEK, {"hidden_size": "8"}, "hidden_size must be int, and is '8'"),
    ("truth", DEEPSEEK, {"hidden_size": True}, "hidden_size must be int, and is True"),
    ("zero", DEEPSEEK, {"index_topk": 0}, "index_topk must be at least 1, and is 0"),
    ("every-other-moe", DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq is 2, and only 1"),
    ("softmax-router", DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
    ("grouped-heads", DEEPSEEK, {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
    ("rope-kind", DEEPSEEK, {"rope_parameters": {"rope_type": "llama3"}}, "'llama3' is not built"),
    (
        "short-list",
        DEEPSEEK,
        {"mlp_layer_types": ["dense"]},
        "dense or sparse for each of 2 layers, and lists 1$",
    ),
    ("scaling-text", DEEPSEEK, {"rope_parameters": "yarn"}, "rope_.* is not a JSON object"),
    ("limited-step", MAMBA2, {"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
    ("short-limit", MAMBA2, {"time_step_limit": [0.0]}, "time_step_limit"),
    ("stop-text", MAMBA2, {"eos_token_id": ["</s>"]}, "eos_token_id must be int"),
    ("odd-rope", DEEPSEEK, {"qk_rope_head_dim": 3}, "3 dimensions cannot be rotated in pairs"),
    ("expert-groups", DEEPSEEK, {"n_group": 3}, "1 of 2 experts cannot be chosen"),
    ("expand", MAMBA2, {"expand": 4}, "expand is 4, and only 2.0"),
]


@pytest.mark.parametrize(
    ("fields", "changes", "message"), [pytest.param(*case[1:], id=case[0]) for case in REFUSED]
)
def test_what_is_not_built_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """The message names the field and what it holds."""
    write_config(tmp_path, fields, **changes)

    with pytest.raises(BadInputError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot read .*config.json"), ("{", "is not JSON"), ("[]", "is not a JSON object")],
    ids=["missing", "broken", "a-list"],
)
def test_file_that_is_no_configuration(tmp_path: Path, text: str | None, message: str) -> None:
    """A missing or broken file is named."""
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")

    with pytest.raises(BadInputError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        pytest.param({}, [0, 1, 2, 3, 4, 5, 6, 7], id="all"),
        pytest.param({"index_topk_pattern": "FSSFFSSS"}, [0, 3, 4], id="pattern"),
        pytest.param(
            {"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6], id="every-fourth"
        ),
        pytest.param(
            {"index_topk_freq": 4, "indexer_types": ["full"] + ["shared"] * 7}, [0], id="listed"
        ),
    ],
)
def test_layers_share_choices_as_told(
    tmp_path: Path, changes: dict[str, Any], own: list[int]
) -> None:
    """A list comes before a pattern, and a pattern before every so many."""
    glm = DEEPSEEK | {"model_type": "glm_moe_dsa", "num_hidden_layers": 8}
    write_config(tmp_path, glm, **changes)

    layers = read_config(tmp_path).layers

    assert own == [
        index
        for index, layer in enumerate(layers)
        if isinstance(layer, AttentionLayer) and isinstance(layer.selection, SelectTopK)
    ]


@pytest.mark.parametrize(
    ("changes", "first", "factor"),
    [
        pytest.param({"rope_scaling": OLD_YARN}, 4096, 40, id="inside"),
        pytest.param(
            {"rope_scaling": OLD_YARN, "original_max_position_embeddings": 32}, 32, 40, id="beside"
        ),
        pytest.param({"rope_scaling": NO_LENGTH}, 64, 40, id="left-out"),
        pytest.param({"rope_scaling": OLD_YARN | {"factor": None}}, 4096, 64 / 4096, id="ratio"),
        pytest.param(
            {"rope_parameters": OLD_YARN | {"factor": 2}, "rope_scaling": OLD_YARN},
            4096,
            40,
            id="both-forms",
        ),
    ],
)
def test_yarn_is_read_as_transformers_reads_it(
    tmp_path: Path, changes: dict[str, Any], first: int, factor: float
) -> None:
    """Its length inside, beside or left out; of two forms the older one counts."""
    write_config(tmp_path, DEEPSEEK, **changes)

    yarn = _first_attention(tmp_path).mla.rope.yarn

    assert yarn is not None
    assert (yarn.original_max_positions, yarn.factor) == (first, factor)


def test_betas_of_zero_are_the_defaults(tmp_path: Path) -> None:
    """As where they are missing."""
    write_config(tmp_path, DEEPSEEK, rope_scaling=OLD_YARN | {"beta_fast": 0, "beta_slow": 0})

    yarn = _first_attention(tmp_path).mla.rope.yarn

    assert yarn is not None
    assert (yarn.beta_fast, yarn.beta_slow) == (32, 1)


def test_a_pattern_may_be_a_list(tmp_path: Path) -> None:
    """Of whole words then, as in ``indexer_types``."""
    pattern = ["full", "shared"]
    write_config(tmp_path, DEEPSEEK, model_type="glm_moe_dsa", index_topk_pattern=pattern)

    layers = read_config(tmp_path).layers

    assert isinstance(layers[1], AttentionLayer)
    assert isinstance(layers[1].selection, SelectShared)


def test_generation_config_says_what_stops_a_text(tmp_path: Path) -> None:
    """Its tokens stop requests where it names some."""
    write_config(tmp_path, MAMBA2, eos_token_id=3)
    further = tmp_path / "generation_config.json"

    further.write_text('{"eos_token_id": [3, 5]}')
    several = read_config(tmp_path).stop_token_ids
    further.write_text('{"temperature": 0.6}')
    none = read_config(tmp_path).stop_token_ids

    assert several == (3, 5)
    assert none == (3,)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    """Some editors write one."""
    write_config(tmp_path, MAMBA2)
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    assert read_config(tmp_path).hidden_size == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param('{"a":' * 5000 + "1" + "}" * 5000, "is nested too deep", id="deep"),
        pytest.param('{"a": 1, "a": 2}', "the key 'a' occurs twice", id="twice"),
        pytest.param('{"vocab_size": ' + "9" * 5000 + "}", "is not JSON", id="long-number"),
        pytest.param(" " * (MAX_CONFIG_BYTES + 1), "16,777,217 bytes", id="large"),
    ],
)
def test_hostile_configurations_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """In one line, without a traceback."""
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(BadInputError, match=message) as refused:
        read_config(tmp_path)

    assert len(str(refused.value)) < 500


def test_a_fifo_is_no_configuration(tmp_path: Path) -> None:
    """Reading does not wait for a writer."""
    os.mkfifo(tmp_path / "config.json")

    with pytest.raises(BadInputError, match="not a regular file"):
        read_config(tmp_path)


def test_pattern_must_name_every_layer(tmp_path: Path) -> None:
    """A pattern of indexers for fewer layers than there are is refused."""
    write_config(tmp_path, DEEPSEEK, model_type="glm_moe_dsa", index_topk_pattern="F")

    with pytest.raises(BadInputError, match="index_topk_pattern"):
        read_config(tmp_path)


def test_the_one_layer_that_is_strange_is_named(tmp_path: Path) -> None:
    """Not all 78 of them."""
    kinds = ["indexed_attention"] * 78
    kinds[40] = "full_attention"
    write_config(tmp_path, DEEPSEEK, num_hidden_layers=78, layer_types=kinds)

    with pytest.raises(BadInputError, match=r"78 layers, and has 'full_attention' for layer 40$"):
        read_config(tmp_path)


def test_kinds_of_indexers_must_be_known(tmp_path: Path) -> None:
    """An indexer that is neither full nor shared is refused."""
    write_config(tmp_path, DEEPSEEK, model_type="glm_moe_dsa", indexer_types=["full", "none"])

    with pytest.raises(BadInputError, match="indexer_types"):
        read_config(tmp_path)
