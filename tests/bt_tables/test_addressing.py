"""Address arithmetic on many rows equals the layout's, in NumPy, in torch and in a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.plans import serving_limits

from bt_tables.reference.addressing import kernel_block_id, local_lengths, locate
from bt_width import (
    MAX_POSITION,
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    InvalidSpecError,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
)

pytestmark = pytest.mark.fast

SPLITS = [(1, 0, 1), (2, 1, 1), (3, 0, 4), (3, 2, 4), (4, 3, 12), (8, 5, 2)]
EDGES = [0, 1, 3, 4, 11, 12, 13, 95, 96, 97, 1000, 2**20 + 7, MAX_POSITION - 1, MAX_POSITION]


def layouts() -> Iterator[BlockTableLayout]:
    groups: list[tuple[CacheSpec, int | None]] = [
        (AttentionSpec(block_size=12), None),
        (AttentionSpec(block_size=12), 4),
        (AttentionSpec(block_size=48, sharded=False), 12),
        (SlidingWindowSpec(block_size=12, window=40), 6),
        (RingSpec(block_size=5), None),
    ]
    for (size, rank, interleave), (spec, kernel_block_size) in product(SPLITS, groups):
        limits = serving_limits(4096, size=size, rank=rank, interleave=interleave)
        yield BlockTableLayout.plan(spec, limits, kernel_block_size)


LAYOUTS = list(layouts())
POSITIONS = np.array([*range(200), *EDGES], np.int64)


@pytest.mark.parametrize("as_array", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_positions_lie_where_the_layout_says(as_array: Any) -> None:
    for layout in LAYOUTS:
        found = locate(layout.addressing, as_array(POSITIONS))

        expected = [layout.locate(position) for position in POSITIONS.tolist()]
        assert found.column.tolist() == [place.column for place in expected]
        assert found.offset.tolist() == [place.offset for place in expected]
        if layout.shards > 1:
            assert found.rank.tolist() == [place.rank for place in expected]
        else:
            assert (found.rank == layout.addressing.rank).all()


@pytest.mark.parametrize("as_array", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_every_rank_keeps_the_lengths_that_the_layout_says(as_array: Any) -> None:
    for layout in LAYOUTS:
        own = local_lengths(layout.addressing, as_array(POSITIONS))

        assert own.tolist() == [layout.local_length(length) for length in POSITIONS.tolist()]
        for rank in range(layout.shards):
            found = local_lengths(layout.addressing, as_array(POSITIONS), rank)
            expected = [layout.local_length(length, rank) for length in POSITIONS.tolist()]
            assert found.tolist() == expected


@pytest.mark.parametrize("as_array", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_blocks_become_the_kernel_blocks_that_the_layout_says(as_array: Any) -> None:
    for layout in LAYOUTS:
        ids = [7, 0, layout.max_block_id, 1][: layout.blocks_per_row]

        parts = list(range(layout.kernel_blocks_per_block))
        found = kernel_block_id(layout.addressing, as_array(ids)[:, None], as_array(parts))

        assert found.flatten().tolist() == layout.expand(ids)


def test_a_group_without_slots_has_no_places() -> None:
    layout = BlockTableLayout.plan(MambaSpec(block_size=16), serving_limits(4096))

    with pytest.raises(InvalidSpecError, match="without slots"):
        locate(layout.addressing, POSITIONS)


def test_the_device_functions_equal_the_reference() -> None:
    from tests.support.addressing_kernels import addressing_kernel

    positions = torch.from_numpy(POSITIONS).int()
    for layout in LAYOUTS:
        address = layout.addressing
        ids = positions % (address.max_block_id + 1)
        outputs = [torch.empty_like(positions) for _ in range(4)]
        addressing_kernel[(-(-len(positions) // 64),)](
            positions,
            ids,
            *outputs,
            len(positions),
            address.shards,
            address.rank,
            address.interleave,
            address.kernel_blocks_per_block,
            TILE=64,
        )

        is_ours, local, lengths, kernel_ids = outputs
        assert lengths.tolist() == local_lengths(address, POSITIONS).tolist()
        parts = torch.arange(len(ids)) % address.kernel_blocks_per_block
        assert torch.equal(kernel_ids, kernel_block_id(address, ids, parts.int()))
        if address.advances:
            places = locate(address, POSITIONS)
            assert is_ours.tolist() == (places.rank == address.rank).astype(int).tolist()
            size = address.kernel_block_size
            assert local.tolist() == (places.column * size + places.offset).tolist()
