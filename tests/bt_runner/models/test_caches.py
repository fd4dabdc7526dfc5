"""The memory behind the tables: how layers share it, and how slots are read and written."""

from __future__ import annotations

import pytest
import torch
from tests.support.poison import POISON

from bt_builders import init_attention
from bt_runner.models.caches import (
    CONV,
    INDEX,
    LATENT,
    STATE,
    CacheOptions,
    Caches,
    cache_groups,
    read_line,
    read_rows,
    read_slots,
    slots_at,
    write,
)
from bt_runner.models.config import hybrid_config
from bt_tables import write_states
from bt_width import AttentionSpec, BlockTableLayout, MultipleOf, ServingLimits

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


def _numbered(num_blocks: int, size: int) -> torch.Tensor:
    """A cache whose every state is its own slot."""
    return torch.arange(num_blocks * size, dtype=torch.float64).view(num_blocks, size, 1)


@pytest.mark.parametrize(
    ("kernel_block_size", "block_size"), [(1, 1), (4, 16), (16, 16), (3, 48), (256, 256)]
)
def test_slots_are_those_of_the_contract(kernel_block_size: int, block_size: int) -> None:
    """A token's place is divided, never used as a column.

    Reported as https://github.com/ROCm/aiter/pull/4440
    and https://github.com/sgl-project/sglang/pull/38187
    and https://github.com/sgl-project/sglang/pull/31218
    """
    limits = ServingLimits(max_model_len=600, max_num_reqs=2, max_num_batched_tokens=8)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=block_size), limits, kernel_block_size)
    ids = [(7 * index) % 601 + 1 for index in range(layout.max_num_blocks)]
    row = layout.expand(ids)
    table = torch.full((2, layout.width), POISON, dtype=torch.int32)
    table[1, : len(row)] = torch.tensor(row)
    positions = torch.tensor([0, 1, 47, 48, 255, 256, 300, 599])
    found = slots_at(table, torch.ones_like(positions), positions, kernel_block_size)
    assert found.tolist() == [layout.slot(position, row) for position in positions.tolist()]


def test_slots_past_32_bits_do_not_wrap() -> None:
    """Block 2^20 of 4,096 tokens begins at slot 2^32.

    Reported as https://github.com/vllm-project/vllm/issues/1486
    """
    table = torch.tensor([[1 << 20]], dtype=torch.int32)
    slots = slots_at(table, torch.tensor([0]), torch.tensor([1]), 4096)
    assert slots.tolist() == [(1 << 32) + 1]


def test_rows_are_read_as_far_as_asked() -> None:
    """Columns behind are not looked at."""
    table = torch.tensor([[3, 1, POISON], [2, 4, POISON]], dtype=torch.int32)
    rows = read_rows(_numbered(5, 2), table, 3)
    assert rows[..., 0].tolist() == [[6, 7, 2, 3], [4, 5, 8, 9]]


def test_spans_are_read_one_after_the_other() -> None:
    """Each from its own start; what is past the last span may be anything."""
    table = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    line = read_line(_numbered(5, 2), table, starts, 6, torch.tensor([1, 0], dtype=torch.int32))
    assert line[:5, 0].tolist() == [7, 2, 4, 5, 8]


def test_padding_slots_read_the_null_block() -> None:
    """They are masked afterwards, and must not fault before."""
    assert read_slots(_numbered(3, 2), torch.tensor([[4, -1]]))[..., 0].tolist() == [[4, 0]]


def test_padding_is_not_written() -> None:
    """Slots [3, -1, -1] of 5 blocks of 16: slot 79, which -1 would wrap to, stays.

    Reported as https://github.com/vllm-project/vllm/issues/43810
    and https://github.com/NVIDIA/TensorRT-LLM/pull/18673
    """
    guarded = torch.arange(7 * 16 * 2, dtype=torch.float64).view(7, 16, 2)
    before = guarded.clone()
    cache = guarded[1:6]
    values = torch.full((3, 2), -5.0, dtype=torch.float64)
    write(cache.flatten(0, 1), torch.tensor([3, -1, -1]), values)
    changed = (guarded != before).any(dim=-1).nonzero().tolist()
    assert changed == [[1, 3]]


def test_it_writes_what_the_reference_writer_writes() -> None:
    """The one of the tables' package, which skips padding with a mask."""
    draw = torch.Generator().manual_seed(0)
    slots = torch.randperm(79, generator=draw)[:20] + 1
    slots[::4] = -1
    values = torch.randn(20, 3, generator=draw, dtype=torch.float64)
    found, wanted = torch.zeros(5, 16, 3, dtype=torch.float64), torch.zeros(5, 16, 3).double()
    write(found.flatten(0, 1), slots, values)
    write_states(wanted, slots, values)
    assert torch.equal(found, wanted)
