"""From a checkpoint's fields to a model's configuration: which families there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bt_runner.errors import BadInputError
from bt_runner.models.checkpoint.deepseek import DEEPSEEK_FAMILIES, deepseek_config
from bt_runner.models.checkpoint.fields import Fields
from bt_runner.models.checkpoint.mamba2 import mamba2_config
from bt_runner.models.checkpoint.shared import stop_tokens
from bt_runner.models.config import ModelConfig
from bt_width.errors import shown

_CONFIGS: dict[str, Callable[[Fields], ModelConfig]] = {
    **dict.fromkeys(DEEPSEEK_FAMILIES, deepseek_config),
    "mamba2": mamba2_config,
}

LOADED_FAMILIES = tuple(_CONFIGS)
"""What ``model_type`` may be."""


def read_config(directory: Path) -> ModelConfig:
    """Return the configuration of a checkpoint.

    Raises:
        BadInputError: The file is missing or broken, is of none of ``LOADED_FAMILIES``, or asks
            for what is not built here.
    """
    fields = Fields.read(directory / "config.json")
    config = config_of(fields)
    quantization = fields.raw("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise BadInputError(
            f"{directory} is quantized ({shown(method or quantization)}, as quantization_config "
            "says), and quantized tensors are not read: convert it to bfloat16 first",
            quantization_config=quantization,
        )
    further = directory / "generation_config.json"
    if not further.exists():
        return config
    # what stops a text when transformers generates one: this file comes first
    stops = stop_tokens(Fields.read(further))
    return replace(config, stop_token_ids=stops or config.stop_token_ids)


def config_of(fields: Fields) -> ModelConfig:
    """Return the configuration of a checkpoint's fields, however its weights are stored.

    Raises:
        BadInputError: As ``read_config``.
    """
    family = fields.get("model_type", str)
    if family not in _CONFIGS:
        raise BadInputError(
            f"{shown(family)[1:-1]} models are not built here; {', '.join(LOADED_FAMILIES)} are",
            model_type=family,
        )
    fields.only("hidden_act", "silu")
    return _CONFIGS[family](fields)
