"""From a checkpoint's fields to a model's configuration: which families there are."""

from __future__ import annotations

from pathlib import Path

from bt_runner.errors import BadInputError
from bt_runner.models.checkpoint.deepseek import deepseek_config
from bt_runner.models.checkpoint.fields import Fields
from bt_runner.models.checkpoint.mamba2 import mamba2_config
from bt_runner.models.config import ModelConfig


def read_config(directory: Path) -> ModelConfig:
    """Return the configuration of a checkpoint.

    Raises:
        BadInputError: The file is missing or broken, is of another family than ``deepseek_v3``,
            ``deepseek_v32``, ``glm_moe_dsa`` and ``mamba2``, or asks for what is not built here.
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
    match family:
        case "deepseek_v3" | "deepseek_v32" | "glm_moe_dsa":
            return deepseek_config(fields, family)
        case "mamba2":
            return mamba2_config(fields)
        case _:
            raise BadInputError(
                f"{family} models are not built here; deepseek_v3, deepseek_v32, glm_moe_dsa and "
                "mamba2 are",
                model_type=family,
            )
