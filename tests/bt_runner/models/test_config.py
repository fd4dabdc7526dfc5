"""Layers that cannot work together are refused by their number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bt_runner.errors import BadInputError
from bt_runner.models.config import (
    AttentionLayer,
    MambaLayer,
    ModelConfig,
    SelectAll,
    SelectShared,
    SelectTopK,
)
from bt_runner.models.hybrid import hybrid_config


def _sparse_layer() -> AttentionLayer:
    layer = hybrid_config().layers[1]
    assert isinstance(layer, AttentionLayer)
    return layer


def test_built_in_hybrid_has_every_kind_of_layer() -> None:
    """Mamba2, sparse MLA and dense MLA, at least six layers, and a vocabulary of bytes."""
    config = hybrid_config()

    kinds = [
        type(layer.selection) if isinstance(layer, AttentionLayer) else type(layer)
        for layer in config.layers
    ]
    assert set(kinds) == {MambaLayer, SelectTopK, SelectAll}
    assert len(kinds) >= 6
    assert config.vocab_size == 256


def test_shared_choice_needs_an_indexer_below() -> None:
    """A layer that shares a choice before there is one is named."""
    layer = replace(_sparse_layer(), selection=SelectShared())

    with pytest.raises(BadInputError, match="layer 0 shares the choice of an indexer below"):
        ModelConfig(vocab_size=2, hidden_size=64, layers=(layer, _sparse_layer()))

    ModelConfig(vocab_size=2, hidden_size=64, layers=(_sparse_layer(), layer))


def test_index_head_must_hold_its_rotary_dimensions() -> None:
    """An index head narrower than what is rotated of it is named."""
    sparse = _sparse_layer()
    assert isinstance(sparse.selection, SelectTopK)
    narrow = replace(sparse, selection=replace(sparse.selection, head_dim=4))

    with pytest.raises(BadInputError, match="layer 1 rotates 8 dimensions of index heads of 4"):
        ModelConfig(vocab_size=2, hidden_size=64, layers=(sparse, narrow))
