"""Tiny random models of transformers, made so that a forgotten norm, bias or decay shows."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

# Read when the library is first imported; nothing here may ask the network for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Imported by name: its types refuse configurations put together from dictionaries.
transformers: Any = import_module("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# Seeds with wide gaps between the best tokens and between the chosen scores: rounding decides none.
SEEDS = {"deepseek_v3": 5, "deepseek_v32": 29, "glm_moe_dsa": 47, "mamba2": 7}
FAMILIES = tuple(SEEDS)
SPARSE_FAMILIES = ("deepseek_v32", "glm_moe_dsa")


class Checkpoint(Protocol):
    """Where a random model of a family lies; with ``same_experts``, all tokens share experts."""

    def __call__(self, family: str, *, same_experts: bool = False) -> Path: ...


_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MLA: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
}
# With fewer heads, scores of exactly zero tie at the edge of the choice
_INDEXER: dict[str, Any] = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 32}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


def tiny_config(family: str, **changes: Any) -> Any:
    """Return a configuration of a family of transformers, with a few changes."""
    match family:
        case "deepseek_v3":
            own = _MLA | {"num_hidden_layers": 3, "rope_parameters": _YARN}
            own |= {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
            return transformers.DeepseekV3Config(**(_COMMON | own | changes))
        case "deepseek_v32":
            own = _MLA | _INDEXER | {"num_hidden_layers": 3, "rope_parameters": _YARN}
            return transformers.DeepseekV32Config(**(_COMMON | own | changes))
        case "glm_moe_dsa":
            kinds = ["full", "full", "shared", "shared", "full"]
            own = _MLA | _INDEXER | {"num_hidden_layers": 5, "indexer_types": kinds}
            return transformers.GlmMoeDsaConfig(**(_COMMON | own | changes))
        case "mamba2":
            return transformers.Mamba2Config(**(_COMMON | _MAMBA | changes))
        case _:
            raise ValueError(family)


def tiny_model(family: str, *, seed: int, **changes: Any) -> Any:
    """Return a random float32 model of a family."""
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    perturb(model, seed)
    return model


@torch.no_grad()
def share_experts(model: nn.Module) -> None:
    """Make every token choose the same experts, so that coarse rounding changes no choice."""
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.arange(len(tensor)) * 2.0)


def load(directory: Path, dtype: torch.dtype) -> Any:
    """Return a saved model, ready to generate; grouped experts know no float64."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, experts_implementation="eager"
    ).eval()


def prompts() -> list[list[int]]:
    """Return four prompts, one a single token and two longer than an index choice."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(97, (n,), generator=generator).tolist() for n in (40, 1, 17, 23)]


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Draw every tensor anew, off the ones and zeros that would hide a mistake.

    The decays' numbers are those of bfloat16: transformers rounds them and the runner does not.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(("A_log", "dt_bias")):
            tensor.copy_((noise - 2.5 * name.endswith("dt_bias")).bfloat16())
        elif name.endswith("e_score_correction_bias"):
            # below every affinity, so that a masked expert must lie below them, too
            tensor.copy_(0.2 * noise - 1.5)
        elif name.endswith("bias"):
            tensor.copy_(0.2 * noise)
        elif name.endswith(".D") or "norm" in name:
            tensor.copy_((1 + 0.2 * noise).bfloat16())
        elif "embed" in name:
            tensor.copy_(noise)
        elif tensor.dim() > 1:
            # what is added to the residual stream is kept small, so that rounding stays small
            adds = any(part in name for part in ("o_proj", "out_proj", "down_proj"))
            tensor.copy_(noise * (0.25 if adds else 1.6) / tensor.shape[-1] ** 0.5)
