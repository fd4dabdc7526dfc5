"""Layers that cannot work together are refused by their number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bt_runner.errors import BadInputError
from bt_runner.models.config import (
    AttentionLayer,
    MambaLayer,
    ModelConfig,
    MoE,
    SelectAll,
    SelectShared,
    SelectTopK,
    hybrid_config,
)
from bt_runner.models.layers.numerics import Rope


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SelectTopK(num_heads=1, head_dim=4, topk=1, rope=Rope(dim=8)),
            "index heads of 4 dimensions cannot rotate 8",
        ),
        (lambda: Rope(dim=5), "5 dimensions cannot be rotated in pairs"),
        (lambda: Rope(dim=0), "0 dimensions cannot be rotated in pairs"),
        (
            lambda: MambaLayer(num_heads=4, head_dim=2, state_size=2, num_groups=3),
            "4 heads cannot be shared out among 3 groups",
        ),
        (lambda: _experts(num_groups=3), "2 of 8 experts cannot be chosen from 1 of 3 groups"),
        (lambda: _experts(num_groups=8), "2 of 8 experts cannot be chosen from 1 of 8 groups"),
        (lambda: _experts(top_groups=2), "2 of 8 experts cannot be chosen from 2 of 1 groups"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(make: Callable[[], object], message: str) -> None:
    """They are refused where they are put together, with the numbers."""
    with pytest.raises(BadInputError, match=message):
        make()


def _experts(num_groups: int = 1, top_groups: int = 1) -> MoE:
    return MoE(
        num_experts=8,
        top_k=2,
        intermediate_size=1,
        num_groups=num_groups,
        top_groups=top_groups,
    )
