"""Bytes of what one layer keeps."""

from __future__ import annotations

import pytest

from bt_runner.geometry.caches import IndexCache, KeyValueCache, LatentCache, StateCache


@pytest.mark.parametrize(
    ("head_dim", "token_bytes"),
    [
        pytest.param(64, 64 + 4, id="less-than-a-scale"),
        pytest.param(128, 128 + 4, id="one-scale"),
        pytest.param(129, 129 + 8, id="one-more"),
    ],
)
def test_an_index_key_has_a_byte_a_number_and_a_scale_for_128(
    head_dim: int, token_bytes: int
) -> None:
    cache = IndexCache(head_dim=head_dim)

    # whatever the rest of the cache is
    assert [cache.token_bytes(2), cache.token_bytes(4)] == [token_bytes] * 2


def test_a_latent_is_kept_once_for_all_heads() -> None:
    assert LatentCache(lora_rank=512, rope_dim=64).token_bytes(2) == 1152


def test_a_key_and_a_value_are_kept_for_each_head() -> None:
    assert KeyValueCache(num_heads=8, head_dim=128).token_bytes(2) == 4096


def test_the_convolution_keeps_one_input_less_than_its_taps() -> None:
    state = StateCache(num_heads=128, head_dim=64, state_size=128, num_groups=8, conv_kernel=4)

    assert state.recurrent_bytes(4) == 4 * 2**20
    assert state.conv_bytes(2) == (128 * 64 + 2 * 8 * 128) * 3 * 2
