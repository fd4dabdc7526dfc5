"""The dense reference: the models in their simplest form, to compare the paged path with."""

from bt_runner.dense.attention import AttentionCache
from bt_runner.dense.mamba import MambaCache
from bt_runner.dense.model import DenseCache, DenseModel, DenseOutput
from bt_runner.dense.selection import Choice

__all__ = [
    "AttentionCache",
    "Choice",
    "DenseCache",
    "DenseModel",
    "DenseOutput",
    "MambaCache",
]
