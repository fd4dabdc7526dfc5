"""Reading and writing a paged cache."""

from __future__ import annotations

import pytest
import torch
from tests.support.poison import POISON

from bt_runner.models.cache.paging import read_line, read_rows, read_slots, slots_at, write
from bt_tables import write_states
from bt_width import AttentionSpec, BlockTableLayout, ServingLimits


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
