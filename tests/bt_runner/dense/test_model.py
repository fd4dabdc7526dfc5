"""The dense reference in itself: it does not matter how a text is cut into forward passes."""

from __future__ import annotations

import pytest
import torch
from tests.bt_runner.harness import dense_hybrid

from bt_runner.dense import AttentionCache, DenseCache, MambaCache
from bt_runner.models.config import MambaLayer

TEXT = list(b"It does not matter how a text is cut into forward passes, for the caches carry on.")


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param([1] * len(TEXT), id="token-by-token"),
        pytest.param([len(TEXT) - 1, 1], id="all-but-one"),
        pytest.param([1, 2, 3, 64, len(TEXT) - 70], id="ragged"),
    ],
)
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    """Logits and every layer's output are those of the whole text."""
    model = dense_hybrid()
    whole = model.forward(TEXT, model.new_cache())

    cache, parts, start = model.new_cache(), [], 0
    for length in cuts:
        parts.append(model.forward(TEXT[start : start + length], cache))
        start += length

    assert cache.num_tokens == len(TEXT)
    torch.testing.assert_close(torch.cat([part.logits for part in parts]), whole.logits)
    for index, expected in enumerate(whole.layer_outputs):
        outputs = torch.cat([part.layer_outputs[index] for part in parts])
        torch.testing.assert_close(outputs, expected)


def test_later_tokens_change_nothing_before_them() -> None:
    """Causality: the logits of a prefix do not depend on what follows."""
    model = dense_hybrid()

    one = model.forward(TEXT, model.new_cache()).logits
    other = model.forward([*TEXT[:40], *reversed(TEXT[40:])], model.new_cache()).logits

    torch.testing.assert_close(one[:40], other[:40], atol=1e-12, rtol=0)
    assert not torch.allclose(one[40:-1], other[40:-1])


def test_caches_hold_what_each_kind_needs() -> None:
    """Attention keeps a row a token, a mixer the same few numbers however long the text is."""
    model = dense_hybrid()
    cache = model.new_cache()

    model.forward(TEXT, cache)

    for layer, kept in zip(model.config.layers, cache.layers, strict=True):
        if isinstance(layer, MambaLayer):
            assert isinstance(kept, MambaCache)
            assert kept.conv.shape == (layer.conv_kernel - 1, layer.conv_channels)
            assert kept.state.shape == (layer.num_heads, layer.head_dim, layer.state_size)
        else:
            assert isinstance(kept, AttentionCache)
            assert kept.latent.shape == (len(TEXT), layer.mla.kv_lora_rank)
            assert kept.rope_key.shape == (len(TEXT), layer.mla.rope.dim)


def test_states_stay_float32_in_a_narrow_model() -> None:
    """A state in bfloat16 would lose a hundredth at every step."""
    model = dense_hybrid(torch.bfloat16)
    cache = model.new_cache()

    output = model.forward(TEXT, cache)

    assert isinstance(cache.layers[0], MambaCache)
    assert cache.layers[0].state.dtype == torch.float32
    assert cache.layers[0].conv.dtype == torch.bfloat16
    assert output.logits.dtype == torch.bfloat16


def test_layers_without_a_choice_have_none() -> None:
    """Only sparse layers say what their tokens see."""
    model = dense_hybrid()

    choices = model.forward(TEXT, model.new_cache()).choices

    assert [choice is not None for choice in choices] == [False, True, False] * 2


def test_cache_of_another_model_is_refused() -> None:
    """A layer that is given another kind of cache says which it is."""
    model = dense_hybrid()
    layers = model.new_cache().layers

    with pytest.raises(TypeError, match="layer 0 was given the cache of another kind of layer"):
        model.forward(TEXT, DenseCache(layers[1:]))
