"""What the configurations of all families say in the same words."""

from __future__ import annotations

from dataclasses import replace

from bt_runner.models.checkpoint.fields import Fields
from bt_runner.models.config import TensorNames

MAX_LAYERS = 10_000
"""Layers beyond which a number is taken for a slip; the largest published models have hundreds."""


def tensor_names(fields: Fields, names: TensorNames) -> TensorNames:
    """Return a family's names, the head's being the embedding's where the two are tied."""
    is_tied = fields.get("tie_word_embeddings", bool, False)
    return replace(names, head=names.embedding) if is_tied else names


def stop_tokens(fields: Fields) -> tuple[int, ...]:
    """Return the tokens that end a text: none, one or several."""
    value = fields.raw("eos_token_id")
    if isinstance(value, list) and all(type(token) is int for token in value):
        return tuple(value)
    return () if value is None else (fields.get("eos_token_id", int),)
