"""Hugging Face checkpoints: their configuration, tensors and tokenizer, from one directory."""

from bt_runner.models.checkpoint.families import read_config
from bt_runner.models.checkpoint.tensors import load_weights
from bt_runner.models.checkpoint.tokenizer import TextTokenizer, load_tokenizer

__all__ = ["TextTokenizer", "load_tokenizer", "load_weights", "read_config"]
