"""The tensors of a model by their Hugging Face names: which there are, and random ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bt_runner.arguments import require_int, require_kind
from bt_runner.devices import find_device
from bt_runner.errors import BadInputError
from bt_runner.memory import require_memory
from bt_runner.models.config import (
    MLA,
    MLP,
    AttentionLayer,
    MambaLayer,
    ModelConfig,
    MoE,
    SelectTopK,
)

Weights = Mapping[str, Tensor]
Shapes = Iterator[tuple[str, tuple[int, ...]]]

_SEEDS = 2**64

# Where rounding to bfloat16 would change a choice or a decay that compounds over the sequence.
_KEPT_WIDE = (
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    "indexer.weights_proj.weight",
    "mixer.A_log",
    "mixer.D",
    "mixer.dt_bias",
)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model by name, in the order they are used."""
    names, hidden = config.names, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (config.vocab_size, hidden)}
    for index, layer in enumerate(config.layers):
        prefix = names.layer(index)
        match layer:
            case AttentionLayer():
                shapes.update(_attention_layer(prefix, layer, hidden))
            case MambaLayer():
                shapes.update(_mamba_layer(prefix, layer, hidden))
    shapes[names.final_norm] = (hidden,)
    if not names.is_tied:
        shapes[names.head] = (config.vocab_size, hidden)
    return shapes


def head_of(config: ModelConfig, weights: Weights) -> Tensor:
    """Return the head: the embedding where the two are tied and no other is stored."""
    names = config.names
    is_shared = names.is_tied and names.head not in weights
    return weights[names.embedding if is_shared else names.head]


def tensor_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype a tensor has in a model of ``dtype``: some are never below float32."""
    return torch.promote_types(dtype, torch.float32) if name.endswith(_KEPT_WIDE) else dtype


def require_weights(config: ModelConfig, weights: Weights) -> None:
    """Refuse tensors that are not those of a model.

    Raises:
        BadInputError: One is missing, or has another shape, or lies on another device.
    """
    require_kind("weights", weights, Mapping)
    device = None
    for name, shape in tensor_shapes(config).items():
        tensor = weights.get(name)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise BadInputError(f"weights have no floating tensor {name!r}", tensor=name)
        if tuple(tensor.shape) != shape:
            raise BadInputError(
                f"weights: {name} has shape {tuple(tensor.shape)}, and the model wants {shape}",
                tensor=name,
                shape=tuple(tensor.shape),
                expected=shape,
            )
        device = device or tensor.device
        if tensor.device != device:
            raise BadInputError(
                f"weights: {name} lies on {tensor.device}, and others on {device}", tensor=name
            )


def random_weights(
    config: ModelConfig, *, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Return weights drawn from a seed, equal on every device.

    They are drawn wide enough that attention is far from uniform and that a forgotten norm, bias
    or decay shows in the output.

    Raises:
        BadInputError: An argument is not what it should be, or the device is not there.
    """
    require_kind("config", config, ModelConfig)
    require_int("seed", seed)
    require_kind("dtype", dtype, torch.dtype)
    if not dtype.is_floating_point:
        raise BadInputError(f"dtype must be a floating one, not {dtype}", dtype=str(dtype))
    device = find_device(device)
    shapes = tensor_shapes(config)
    # the largest is drawn in float64 on the host before it becomes what it is to be
    sizes = [math.prod(shape) for shape in shapes.values()]
    require_memory("the weights", sum(sizes) * dtype.itemsize, device)
    require_memory("the largest tensor of the weights", 16 * max(sizes), "cpu")
    generator = torch.Generator().manual_seed(seed % _SEEDS)
    return {
        name: _draw(name, shape, generator).to(device=device, dtype=tensor_dtype(name, dtype))
        for name, shape in shapes.items()
    }


def _attention_layer(prefix: str, layer: AttentionLayer, hidden: int) -> Shapes:
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield from _mla(f"{prefix}self_attn.", layer.mla, hidden)
    if isinstance(layer.selection, SelectTopK):
        yield from _indexer(f"{prefix}self_attn.indexer.", layer.selection, layer.mla, hidden)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    match layer.feed_forward:
        case MLP(intermediate_size=size):
            yield from _mlp(f"{prefix}mlp.", size, hidden)
        case MoE() as moe:
            yield from _moe(f"{prefix}mlp.", moe, hidden)


def _mla(prefix: str, mla: MLA, hidden: int) -> Shapes:
    def linear(name: str, outputs: int, inputs: int, has_bias: bool) -> Shapes:
        yield f"{prefix}{name}.weight", (outputs, inputs)
        if has_bias:
            yield f"{prefix}{name}.bias", (outputs,)

    if mla.q_lora_rank is None:
        yield f"{prefix}q_proj.weight", (mla.num_heads * mla.qk_dim, hidden)
    else:
        yield from linear("q_a_proj", mla.q_lora_rank, hidden, mla.has_bias)
        yield f"{prefix}q_a_layernorm.weight", (mla.q_lora_rank,)
        yield f"{prefix}q_b_proj.weight", (mla.num_heads * mla.qk_dim, mla.q_lora_rank)
    yield from linear("kv_a_proj_with_mqa", mla.kv_lora_rank + mla.rope.dim, hidden, mla.has_bias)
    yield f"{prefix}kv_a_layernorm.weight", (mla.kv_lora_rank,)
    yield (
        f"{prefix}kv_b_proj.weight",
        (mla.num_heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank),
    )
    yield from linear("o_proj", hidden, mla.num_heads * mla.v_dim, mla.has_bias)


def _indexer(prefix: str, indexer: SelectTopK, mla: MLA, hidden: int) -> Shapes:
    rank = mla.q_lora_rank or hidden
    yield f"{prefix}wq_b.weight", (indexer.num_heads * indexer.head_dim, rank)
    yield f"{prefix}wk.weight", (indexer.head_dim, hidden)
    yield f"{prefix}k_norm.weight", (indexer.head_dim,)
    yield f"{prefix}k_norm.bias", (indexer.head_dim,)
    yield f"{prefix}weights_proj.weight", (indexer.num_heads, hidden)


def _mlp(prefix: str, size: int, hidden: int) -> Shapes:
    yield f"{prefix}gate_proj.weight", (size, hidden)
    yield f"{prefix}up_proj.weight", (size, hidden)
    yield f"{prefix}down_proj.weight", (hidden, size)


def _moe(prefix: str, moe: MoE, hidden: int) -> Shapes:
    yield f"{prefix}gate.weight", (moe.num_experts, hidden)
    yield f"{prefix}gate.e_score_correction_bias", (moe.num_experts,)
    for expert in range(moe.num_experts):
        yield from _mlp(f"{prefix}experts.{expert}.", moe.intermediate_size, hidden)
    yield from _mlp(f"{prefix}shared_experts.", moe.intermediate_size * moe.num_shared, hidden)


def _mamba_layer(prefix: str, layer: MambaLayer, hidden: int) -> Shapes:
    inner, channels = layer.inner_size, layer.conv_channels
    yield f"{prefix}norm.weight", (hidden,)
    yield f"{prefix}mixer.in_proj.weight", (inner + channels + layer.num_heads, hidden)
    if layer.has_bias:
        yield f"{prefix}mixer.in_proj.bias", (inner + channels + layer.num_heads,)
    yield f"{prefix}mixer.conv1d.weight", (channels, 1, layer.conv_kernel)
    if layer.has_conv_bias:
        yield f"{prefix}mixer.conv1d.bias", (channels,)
    for name in ("dt_bias", "A_log", "D"):
        yield f"{prefix}mixer.{name}", (layer.num_heads,)
    yield f"{prefix}mixer.norm.weight", (inner,)
    yield f"{prefix}mixer.out_proj.weight", (hidden, inner)
    if layer.has_bias:
        yield f"{prefix}mixer.out_proj.bias", (hidden,)


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    match name.rsplit(".", 2)[-2:]:
        case [_, "A_log"]:
            return normal
        case [_, "dt_bias"]:
            # steps of a few hundredths to a half: some heads forget at once, others hardly
            return normal - 2.5
        case [_, "e_score_correction_bias"]:
            # below every affinity, so that an expert of a group left out must lie lower still
            return 0.2 * normal - 1.5
        case [_, "bias"]:
            return 0.2 * normal
        case ["embed_tokens" | "embeddings", _]:
            return normal
        case _ if len(shape) == 1:
            return 1 + 0.2 * normal
        case _:
            return normal * 1.6 / math.sqrt(math.prod(shape[1:]))
