"""What transformers keeps when a tiny random model of a family runs is what ``read_model`` says."""

import importlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from bt_width import ModelCaches, read_model
from bt_width.models.caches import IndexCache, KeyValueCache, LatentCache, Layer, StateCache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

NUM_TOKENS = 11

Settings = dict[str, Any]

LEFT_OUT = object()

TINY: Settings = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: Settings = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 16,
}
LATENT: Settings = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    **EXPERTS,
}
INDEXER: Settings = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 4}
DELTA: Settings = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "head_dim": 24,
    **EXPERTS,
}
MAMBA2: Settings = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
WINDOW: Settings = {"sliding_window": 5}
HEAD: Settings = {"head_dim": 24}
ROPE: Settings = {"rope_type": "default", "rope_theta": 10_000.0}
WINDOWS: Settings = {"layer_types": ["sliding_attention", "full_attention"] * 2, **WINDOW}
LISTED: Settings = {**WINDOWS, **HEAD}

CASES: list[tuple[str, Settings]] = [
    ("llama", {}),
    ("llama", {**HEAD, "num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 4}),
    ("mistral", WINDOW),
    ("mistral", {**HEAD, "sliding_window": None}),
    ("mixtral", {**EXPERTS, **WINDOW}),
    ("ministral", {**LISTED, **HEAD}),
    ("ministral3", HEAD),
    ("qwen2", {}),
    ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen2", {**WINDOW, "use_sliding_window": False, "max_window_layers": 1}),
    ("qwen2_moe", EXPERTS),
    ("qwen3", {**HEAD, **WINDOW, "use_sliding_window": True, "max_window_layers": 3}),
    ("qwen3_moe", {**HEAD, **EXPERTS}),
    ("phi", {}),
    ("phi3", {**WINDOW, "rope_parameters": None}),
    ("phimoe", {**EXPERTS, "sliding_window": None}),
    ("granite", {}),
    ("granitemoe", EXPERTS),
    ("granitemoeshared", EXPERTS),
    ("granite_swa", WINDOWS),
    ("granitemoe_swa", {**WINDOWS, **EXPERTS}),
    ("olmo", {}),
    ("olmo2", {}),
    ("olmo3", {"sliding_window": 5}),
    ("olmoe", EXPERTS),
    ("flex_olmo", EXPERTS),
    ("gpt_oss", {**HEAD, **EXPERTS, **WINDOW}),
    ("gemma", HEAD),
    ("gemma2", {**HEAD, **WINDOW}),
    ("gemma3_text", {**HEAD, **WINDOW, "num_hidden_layers": 7}),
    ("gemma3_text", {**HEAD, **WINDOW, "sliding_window_pattern": 2}),
    (
        "gemma3_text",
        {
            **WINDOW,
            "num_attention_heads": LEFT_OUT,
            "num_key_value_heads": LEFT_OUT,
            "head_dim": LEFT_OUT,
        },
    ),
    (
        "gemma3n_text",
        {
            **LISTED,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [48] * 4,
        },
    ),
    (
        "gemma4_text",
        {
            **LISTED,
            "global_head_dim": 40,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
        },
    ),
    (
        "gemma4_text",
        {
            **LISTED,
            "global_head_dim": 40,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
        },
    ),
    ("vaultgemma", {**HEAD, **WINDOW}),
    ("cohere", {}),
    ("cohere2", {**WINDOW}),
    ("cohere2_moe", {**LISTED, **EXPERTS}),
    ("glm", HEAD),
    ("glm4", HEAD),
    ("glm4_moe", {**HEAD, **EXPERTS}),
    ("step3p5", {**LISTED, **EXPERTS, "pad_token_id": 0}),
    ("mimo_v2_flash", {**LISTED, **EXPERTS, "v_head_dim": 20}),
    ("minimax_m2", {**HEAD, **EXPERTS}),
    ("seed_oss", HEAD),
    ("smollm3", {}),
    ("starcoder2", WINDOW),
    ("stablelm", {}),
    ("exaone4", {**HEAD, **WINDOW, "sliding_window_pattern": 2}),
    ("exaone_moe", {**LISTED, **EXPERTS}),
    ("hunyuan_v1_dense", HEAD),
    ("hunyuan_v1_moe", {**HEAD, **EXPERTS, "moe_topk": [2] * 4}),
    ("ernie4_5", HEAD),
    ("ernie4_5_moe", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}),
    ("dots1", {**LISTED, **EXPERTS}),
    ("apertus", {}),
    ("arcee", {}),
    ("afmoe", {**LISTED, **EXPERTS}),
    ("helium", {"head_dim": 16}),
    ("internlm3", HEAD),
    ("nemotron", {}),
    ("persimmon", {"num_key_value_heads": 4}),
    (
        "llama4_text",
        {**HEAD, **EXPERTS, "attention_chunk_size": 5, "intermediate_size_mlp": 48},
    ),
    ("bitnet", {}),
    ("cwm", {**LISTED, "bos_token_id": 1}),
    ("jais2", HEAD),
    ("solar_open", {**HEAD, **EXPERTS}),
    ("hy_v3", {**HEAD, **EXPERTS}),
    ("laguna", {**LISTED, **EXPERTS}),
    ("mellum", {**LISTED, **EXPERTS}),
    ("iquestcoder", HEAD),
    ("deepseek_v2", {**LATENT, "topk_method": "greedy"}),
    ("deepseek_v3", LATENT),
    ("minicpm3", LATENT),
    (
        "longcat_flash",
        {**LATENT, "head_dim": 8, "num_layers": 2, "ffn_hidden_size": 48, "moe_topk": 2},
    ),
    ("glm4_moe_lite", LATENT),
    ("youtu", LATENT),
    ("axk1", LATENT),
    ("deepseek_v32", {**LATENT, **INDEXER}),
    ("glm_moe_dsa", {**LATENT, **INDEXER}),
    ("glm_moe_dsa", {**LATENT, **INDEXER, "indexer_types": ["full", "shared"] * 2}),
    ("glm_moe_dsa", {**LATENT, **INDEXER, "index_topk_pattern": "FSSF"}),
    ("glm_moe_dsa", {**LATENT, **INDEXER, "index_topk_freq": 2, "index_skip_topk_offset": 1}),
    ("qwen3_next", {**DELTA, "full_attention_interval": 4}),
    ("qwen3_next", {**DELTA, "full_attention_interval": 2}),
    ("qwen3_5_text", {**DELTA, "full_attention_interval": 4}),
    ("qwen3_5_moe_text", {**DELTA, "layer_types": ["linear_attention", "full_attention"] * 2}),
    (
        "olmo_hybrid",
        {
            **{key: value for key, value in DELTA.items() if key != "head_dim"},
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_parameters": None,
        },
    ),
    (
        "kimi_linear",
        {
            **LATENT,
            "linear_attn_config": {
                "full_attn_layers": [2, 4],
                "kda_layers": [1, 3],
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    ("bailing_hybrid", {**LATENT, **HEAD, "short_conv_kernel_size": 4, "layer_group_size": 2}),
    ("mistral4", LATENT),
    ("sarvam_mla", LATENT),
    ("sarvam_moe", {**HEAD, **EXPERTS}),
    ("axk2", {**LATENT, **INDEXER}),
    ("hy_v4", {**LATENT, **INDEXER, "indexer_types": ["full", "shared", "full", "shared"]}),
    ("qwen2_vl_text", {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}),
    ("qwen3_vl_text", HEAD),
    ("glm4v_text", {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}),
    ("qwen2_5_omni_text", {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}),
    ("qwen3_omni_moe_text", {**HEAD, **EXPERTS}),
    ("gpt_neox", {"num_key_value_heads": 4}),
    ("qwen3_vl_moe_text", {**HEAD, **EXPERTS}),
    ("minimax", {**HEAD, **EXPERTS, "layer_types": ["linear_attention", "full_attention"] * 2}),
    ("lfm2", {"conv_L_cache": 3, "full_attn_idxs": [1, 3]}),
    ("lfm2_moe", {**EXPERTS, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2}),
    ("mamba", {"state_size": 12, "conv_kernel": 4, "expand": 2}),
    ("falcon_mamba", {"state_size": 12, "conv_kernel": 4, "expand": 2}),
    (
        "mamba2",
        {
            "state_size": 12,
            "conv_kernel": 4,
            "expand": 2,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    (
        "jamba",
        {
            **EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 12,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    ("bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    ("falcon_h1", {**MAMBA2, **HEAD, "mamba_d_ssm": 128}),
    (
        "granitemoehybrid",
        {
            **MAMBA2,
            **EXPERTS,
            "layer_types": ["mamba", "attention"] * 2,
            "shared_intermediate_size": 16,
        },
    ),
    (
        "nemotron_h",
        {
            **HEAD,
            **EXPERTS,
            "hybrid_override_pattern": "M*-M",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 12,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    (
        "zamba2",
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_key_value_heads": 4,
            "n_mamba_heads": 8,
            "mamba_d_state": 12,
            "mamba_ngroups": 2,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
        },
    ),
]


CASES += [
    ("qwen3", {**HEAD, "num_attention_heads": heads, "num_key_value_heads": kept})
    for heads, kept in ((6, 1), (6, 2), (6, 3), (6, 6))
]
CASES += [
    (
        "qwen3_next",
        {
            **DELTA,
            "full_attention_interval": 2,
            "linear_num_key_heads": keys,
            "linear_num_value_heads": values,
        },
    )
    for keys, values in ((1, 3), (2, 2), (4, 8))
]
CASES += [
    ("bamba", {**MAMBA2, "attn_layer_indices": [0, 3], "mamba_n_groups": groups})
    for groups in (1, 4, 8)
]
CASES += [
    ("gpt_oss", {**HEAD, **EXPERTS, "sliding_window": window, "num_hidden_layers": layers})
    for window, layers in ((2, 3), (10, 5), (40, 4))
]


def _kept_of(cache: Any) -> Iterator[dict[str, Any]]:
    """What each layer of a cache holds after a run: shapes without the batch."""
    linear = getattr(cache, "linear_cache", [])
    for place, layer in enumerate(cache.layers):
        kept: dict[str, Any] = {}
        if place < len(linear) and torch.is_tensor(linear[place]):
            kept["recurrent_states"] = [tuple(linear[place].shape[1:])]
        for name in ("keys", "values", "indexer_keys"):
            tensor: Any = getattr(layer, name, None)
            if torch.is_tensor(tensor) and tensor.numel():
                kept[name] = tuple(tensor.shape[1:])
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, None)
            if isinstance(states, dict):
                states = list(states.values())
            states = states if isinstance(states, list | tuple) else [states]
            shapes = [tuple(state.shape[1:]) for state in states if torch.is_tensor(state)]
            if shapes:
                kept[name] = shapes
        yield kept


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _run(model_type: str, settings: Settings) -> tuple[ModelCaches, list[dict[str, Any]]]:
    settings = {key: value for key, value in (TINY | settings).items() if value is not LEFT_OUT}
    config = transformers.CONFIG_MAPPING[model_type](**settings)
    torch.manual_seed(0)
    with torch.no_grad():
        model = _model_class(model_type)._from_config(config).eval()
        # MiniMax makes a cache of its own
        cache = None if model_type == "minimax" else transformers.DynamicCache(config=config)
        tokens = torch.randint(0, 97, (1, NUM_TOKENS))
        positions = torch.arange(NUM_TOKENS)[None]
        cache = model(tokens, cache=cache, use_cache=True, position_ids=positions).cache
    published = json.loads(json.dumps({"model_type": model_type, **settings}))
    return read_model(published), list(_kept_of(cache))


INNER_MODELS = {
    "step3p5": ("step3p7", "Step3p7TextModel"),
    "qwen2_5_omni_text": ("qwen2_5_omni", "Qwen2_5OmniThinkerTextModel"),
    "qwen3_omni_moe_text": ("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel"),
}
"""Language models of multimodal ones, which AutoModel does not make alone."""


def _model_class(model_type: str) -> Any:
    if model_type in INNER_MODELS:
        folder, name = INNER_MODELS[model_type]
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        return getattr(module, name)
    return transformers.AutoModel._model_mapping[transformers.CONFIG_MAPPING[model_type]]


def _tokens_kept(layer: Layer) -> int:
    windows = [cache.window for cache in layer if isinstance(cache, KeyValueCache)]
    if windows and windows[0] is not None:
        # transformers drops the token that the next step no longer sees
        return min(NUM_TOKENS, windows[0] - 1)
    return NUM_TOKENS


def _numbers_per_token(layer: Layer) -> int:
    numbers = 0
    for cache in layer:
        match cache:
            case KeyValueCache():
                numbers += cache.num_heads * (cache.key_dim + cache.value_dim)
            case LatentCache():
                numbers += cache.lora_rank + cache.rope_dim
            case IndexCache():
                numbers += cache.head_dim
            case StateCache():
                pass
    return numbers


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        pytest.param(name, settings, id=f"{name}-{number}")
        for number, (name, settings) in enumerate(CASES)
    ],
)
def test_what_a_run_keeps_is_what_the_config_says(model_type: str, settings: Settings) -> None:
    model, kept = _run(model_type, settings)

    assert len(model.layers) == len(kept)
    for layer, found in zip(model.layers, kept, strict=True):
        per_token = sum(_count(found[k]) for k in ("keys", "values", "indexer_keys") if k in found)
        assert per_token == _numbers_per_token(layer) * _tokens_kept(layer)
        states = [cache for cache in layer if isinstance(cache, StateCache)]
        recurrent = sum(map(_count, found.get("recurrent_states", [])))
        assert recurrent == sum(_count(s.state_shape) for s in states if s.state_shape)
        # transformers keeps all taps of the convolution, of which the oldest is never read
        conv = sum(map(_count, found.get("conv_states", [])))
        channels = sum(count * each for s in states for count, each in s.conv_parts)
        taps = max((s.conv_taps + 1 for s in states), default=0)
        assert conv == channels * taps
