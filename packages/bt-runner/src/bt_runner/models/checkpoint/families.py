"""From a checkpoint's fields to a model's configuration: which families there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bt_runner.errors import BadInputError
from bt_runner.models.checkpoint.deepseek import DEEPSEEK_FAMILIES, deepseek_config
from bt_runner.models.checkpoint.fields import Fields
from bt_runner.models.checkpoint.mamba2 import mamba2_config
from bt_runner.models.config import ModelConfig

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
    fields.only("quantization_config")
    fields.only("hidden_act", "silu")
    return config_of(fields)


def config_of(fields: Fields) -> ModelConfig:
    """Return the configuration of a checkpoint's fields, however its weights are stored.

    Raises:
        BadInputError: As ``read_config``.
    """
    family = fields.get("model_type", str)
    if family not in _CONFIGS:
        raise BadInputError(
            f"{family} models are not built here; {', '.join(LOADED_FAMILIES)} are",
            model_type=family,
        )
    return _CONFIGS[family](fields)
