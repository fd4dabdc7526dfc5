"""What a model is made of, layer by layer, as frozen numbers; it knows no tensors and no files."""

from bt_runner.models.config.attention import (
    MLA,
    SelectAll,
    Selection,
    SelectShared,
    SelectTopK,
)
from bt_runner.models.config.feed_forward import MLP, MoE
from bt_runner.models.config.mamba2 import MambaLayer
from bt_runner.models.config.model import AttentionLayer, LayerConfig, ModelConfig, TensorNames

__all__ = [
    "MLA",
    "MLP",
    "AttentionLayer",
    "LayerConfig",
    "MambaLayer",
    "MoE",
    "ModelConfig",
    "SelectAll",
    "SelectShared",
    "SelectTopK",
    "Selection",
    "TensorNames",
]
