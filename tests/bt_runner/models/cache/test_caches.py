"""The memory behind the tables, and how layers share it."""

from __future__ import annotations

import torch

from bt_builders import init_attention
from bt_runner.models.cache.cache_groups import (
    CONV,
    INDEX,
    LATENT,
    STATE,
    CacheOptions,
    cache_groups,
)
from bt_runner.models.cache.caches import Caches
from bt_runner.models.config import hybrid_config
from bt_width import MultipleOf, ServingLimits

LIMITS = ServingLimits(max_model_len=512, max_num_reqs=2, max_num_batched_tokens=64)


def _caches(options: CacheOptions, dtype: torch.dtype = torch.bfloat16) -> Caches:
    groups = cache_groups(hybrid_config(), options)
    setup = init_attention([group.attention for group in groups], LIMITS, "cpu")
    return Caches(groups, setup.layouts, (5, 6, 7), dtype, torch.device("cpu"))


def test_caches_are_allocated_in_kernel_blocks() -> None:
    """5 blocks of 128 tokens that kernels read in blocks of 64: 10 of 64, not 5 of 128.

    Reported as https://github.com/vllm-project/vllm/issues/42846
    and https://github.com/vllm-project/vllm/pull/42766
    and https://github.com/vllm-project/vllm/pull/28677
    """
    options = CacheOptions(
        attention_block_size=128, sparse_block_size=192, kernel_block_sizes=(64,)
    )
    caches = _caches(options)
    assert caches[2, LATENT].shape == (10, 64, 40)
    assert caches[1, LATENT].shape == (18, 64, 40)
    assert caches[1, INDEX].shape == (18, 64, 16)


def test_a_state_is_never_narrower_than_float32() -> None:
    """It is added to at every token; what is only stored keeps the model's dtype."""
    caches = _caches(CacheOptions())
    assert caches[0, STATE].shape == (7, 8, 16, 16)
    assert caches[0, STATE].dtype is torch.float32
    assert caches[0, CONV].dtype is torch.bfloat16
    assert _caches(CacheOptions(), torch.float64)[0, STATE].dtype is torch.float64


def test_every_group_has_its_own_block_size() -> None:
    """There is no global one to be divided by.

    Reported as https://github.com/vllm-project/vllm/issues/51163
    and https://github.com/vllm-project/vllm-ascend/issues/14479
    and https://github.com/LMCache/LMCache/issues/3571
    """
    options = CacheOptions(
        attention_block_size=16,
        sparse_block_size=64,
        mamba_block_size=24,
        kernel_block_sizes=(MultipleOf(1),),
    )
    groups = cache_groups(hybrid_config(), options)
    layouts = init_attention([group.attention for group in groups], LIMITS, "cpu").layouts
    assert [layout.block_size for layout in layouts] == [16, 64, 24]


def test_layers_of_one_kind_share_a_group() -> None:
    """And a group without layers is left out."""
    groups = cache_groups(hybrid_config(), CacheOptions())
    assert [(group.name, group.num_layers) for group in groups] == [
        ("dense", 2),
        ("sparse", 2),
        ("mamba", 2),
    ]


def test_blocks_are_copied_in_every_cache_of_a_group() -> None:
    """But not onto the null block."""
    groups = cache_groups(hybrid_config(), CacheOptions())
    caches = _caches(CacheOptions())
    for tensor in groups[2].tensors:
        cache = caches[tensor.layer, tensor.name]
        cache.copy_(torch.arange(7).view(-1, *(1,) * (cache.dim() - 1)).expand_as(cache))
    caches.copy(2, torch.tensor([3, 5]), torch.tensor([1, 0]))
    for tensor in groups[2].tensors:
        firsts = caches[tensor.layer, tensor.name].flatten(1)[:, 0].tolist()
        assert firsts == [0, 3, 2, 3, 4, 5, 6]
