"""Mamba2: mixers and nothing else."""

from __future__ import annotations

from bt_runner.models.checkpoint.fields import Fields
from bt_runner.models.checkpoint.shared import MAX_LAYERS, stop_tokens, tensor_names
from bt_runner.models.config import MambaLayer, ModelConfig, TensorNames

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
        names=tensor_names(fields, names),
    )
