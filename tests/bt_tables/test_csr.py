"""Promises of compressed rows: the length of a sequence counts, not that of its row."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.support.poison import POISON
from tests.support.tables import batch_of, on_reference_and_kernel, plan_groups

from bt_tables import CsrTable, MultiGroupBlockTable, StagedBlockTables
from bt_tables.devices import Executor
from bt_width import (
    PAD_SLOT,
    AttentionSpec,
    ContextParallel,
    InvalidEditError,
    MambaSpec,
    RingSpec,
    RowOverflowError,
    ServingLimits,
    WidthMismatchError,
)

pytestmark = pytest.mark.fast

ExecutorClass = Callable[[], Executor]
LIMITS = ServingLimits(max_model_len=256, max_num_reqs=4, max_num_batched_tokens=8)


@on_reference_and_kernel
def test_blocks_beyond_the_length_are_left_out(executor_class: ExecutorClass) -> None:
    layouts = plan_groups(LIMITS, AttentionSpec(block_size=16), (AttentionSpec(block_size=16), 8))
    tables = StagedBlockTables(layouts, device=executor_class())
    tables.append_block_ids(3, [[5, 6, 7], [5, 6, 7]])
    tables.append_block_ids(1, [[8], [8]])
    tables.step(batch_of([3, 0, 1]))
    lengths = np.array([32, 0, 9], np.int32)

    plain = tables.gather_csr(0, lengths, 3)
    split = tables.gather_csr(1, torch.from_numpy(lengths), 3)

    assert plain.indptr.tolist() == [0, 2, 2, 3]
    assert plain.indices.tolist() == [5, 6, 8]
    assert plain.last_block_len.tolist() == [16, 0, 9]
    assert split.indptr.tolist() == [0, 4, 4, 6]
    assert split.indices.tolist() == [10, 11, 12, 13, 16, 17]
    assert split.last_block_len.tolist() == [8, 0, 1]
    assert {tensor.dtype for tensor in plain} == {torch.int32}


@on_reference_and_kernel
def test_tokens_are_slots_and_null_blocks_have_none(executor_class: ExecutorClass) -> None:
    layouts = plan_groups(LIMITS, AttentionSpec(block_size=4))
    tables = MultiGroupBlockTable(layouts, device=executor_class())
    tables.add_row([[0, 6, 2**30]], 0)
    tables.add_row([[9]], 1)
    tables.commit(2)

    found = tables.gather_token_csr(0, np.array([9, 1, 77], np.int64), 2)

    assert found.indptr.tolist() == [0, 9, 10]
    assert found.indices.tolist() == [PAD_SLOT] * 4 + [24, 25, 26, 27, 2**32, 36]
    assert found.last_block_len.tolist() == [1, 1]


@on_reference_and_kernel
def test_many_requests_and_more_ids_than_a_tile(executor_class: ExecutorClass) -> None:
    limits = ServingLimits(max_model_len=1200, max_num_reqs=9, max_num_batched_tokens=8)
    (layout,) = plan_groups(limits, (AttentionSpec(block_size=6), 2))
    tables = MultiGroupBlockTable([layout], device=executor_class())
    ids = [[row * 1000 + block for block in range(1, 150)] for row in range(9)]
    for row, held in enumerate(ids):
        tables.add_row([held], row)
    tables.commit(9)
    lengths = [1, 0, 2, 3, 894, 0, 6, 7, 500]

    found = tables.gather_csr(0, np.array(lengths, np.int32), 9)

    expected = [
        layout.expand(held)[: -(-length // 2)] for held, length in zip(ids, lengths, strict=True)
    ]
    assert found.indices.tolist() == list(chain.from_iterable(expected))


def test_a_rank_counts_the_tokens_it_keeps() -> None:
    context = ContextParallel(size=2, rank=1, interleave=1)
    limits = ServingLimits(
        max_model_len=256, max_num_reqs=4, max_num_batched_tokens=8, context_parallel=context
    )
    (layout,) = plan_groups(limits, AttentionSpec(block_size=4))
    tables = StagedBlockTables([layout], device="cpu")
    tables.append_block_ids(0, [[5, 6, 7]])
    tables.step(batch_of([0]))

    found = tables.gather_csr(0, np.array([layout.local_length(11)], np.int32), 1)

    assert found.indices.tolist() == [5, 6]
    assert found.last_block_len.tolist() == [1]


def test_no_requests_give_an_empty_table() -> None:
    tables = StagedBlockTables(plan_groups(LIMITS, AttentionSpec(block_size=4)), device="cpu")

    found = tables.gather_csr(0, np.empty(0, np.int32), 0)

    assert found.indptr.tolist() == [0]
    assert found.indices.numel() == found.last_block_len.numel() == 0


@pytest.mark.parametrize(
    ("group", "lengths", "num_reqs", "error"),
    [
        pytest.param(0, np.array([257], np.int32), 1, RowOverflowError, id="past-the-width"),
        pytest.param(0, np.array([-1], np.int32), 1, InvalidEditError, id="negative"),
        pytest.param(0, np.array([1], np.int32), 2, WidthMismatchError, id="a-length-missing"),
        pytest.param(0, np.array([1.0]), 1, WidthMismatchError, id="floats"),
        pytest.param(0, np.array([1], np.int32), 5, InvalidEditError, id="too-many-requests"),
        pytest.param(1, np.array([1], np.int32), 1, InvalidEditError, id="mamba"),
        pytest.param(2, np.array([1], np.int32), 1, InvalidEditError, id="ring"),
        pytest.param(3, np.array([1], np.int32), 1, InvalidEditError, id="no-group"),
    ],
)
def test_what_has_no_compressed_rows_is_refused(
    group: int,
    lengths: np.ndarray[tuple[int], np.dtype[np.int32]],
    num_reqs: int,
    error: type[Exception],
) -> None:
    layouts = plan_groups(
        LIMITS, AttentionSpec(block_size=16), MambaSpec(block_size=16), RingSpec(block_size=16)
    )
    tables = StagedBlockTables(layouts, device="cpu")

    with pytest.raises(error):
        tables.gather_csr(group, lengths, num_reqs)


def two_requests(executor: Executor | str = "cpu") -> StagedBlockTables:
    """Rows of two and three blocks of 16, cut in two each, and a batch of both."""
    layouts = plan_groups(LIMITS, (AttentionSpec(block_size=16), 8))
    tables = StagedBlockTables(layouts, device=executor)
    tables.append_block_ids(3, [[5, 6]])
    tables.append_block_ids(1, [[7, 8, 9]])
    tables.step(batch_of([3, 1]))
    return tables


def buffers(indices: int, dtype: torch.dtype = torch.int32, requests: int = 4) -> CsrTable:
    return CsrTable(
        torch.full((requests + 1,), POISON, dtype=torch.int32),
        torch.full((indices,), POISON, dtype=dtype),
        torch.full((requests,), POISON, dtype=torch.int32),
    )


@on_reference_and_kernel
def test_rows_are_written_to_buffers_that_a_graph_may_hold(executor_class: ExecutorClass) -> None:
    """Requests behind the batch are empty, and indices behind the last one left alone."""
    tables = two_requests(executor_class())
    lengths = np.array([17, 33], np.int32)
    ids, slots = buffers(10), buffers(60, torch.int64)
    addresses = [buffer.data_ptr() for buffer in (*ids, *slots)]

    found = tables.gather_csr(0, lengths, 2, out=ids)
    tokens = tables.gather_token_csr(0, lengths, 2, out=slots)

    assert found is ids
    assert tokens is slots
    assert [buffer.data_ptr() for buffer in (*found, *tokens)] == addresses
    fresh = tables.gather_csr(0, lengths, 2)
    assert found.indptr.tolist() == [*fresh.indptr.tolist(), 8, 8]
    assert found.indices.tolist() == [*fresh.indices.tolist(), POISON, POISON]
    assert found.last_block_len.tolist() == [1, 1, 0, 0]
    assert tokens.indptr.tolist() == [0, 17, 50, 50, 50]
    own = tables.gather_token_csr(0, lengths, 2).indices.tolist()
    assert tokens.indices.tolist() == [*own, *[POISON] * 10]


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(buffers(7), id="indices-too-few"),
        pytest.param(buffers(10, requests=1), id="requests-too-few"),
        pytest.param(buffers(10, torch.int64), id="slots-for-ids"),
        pytest.param(
            buffers(10)._replace(indptr=torch.zeros(10, dtype=torch.int32)[::2]), id="gaps"
        ),
        pytest.param(tuple(buffers(10)), id="a-tuple"),
        pytest.param(buffers(10)._replace(indices=cast(Any, [0] * 10)), id="a-list"),
    ],
)
def test_buffers_without_room_are_refused_before_anything_is_written(out: CsrTable) -> None:
    tables = two_requests()
    before = [torch.as_tensor(buffer).clone() for buffer in out]

    with pytest.raises(WidthMismatchError, match="out"):
        tables.gather_csr(0, np.array([17, 33], np.int32), 2, out=out)

    assert all(map(torch.equal, map(torch.as_tensor, out), before))


def test_a_length_past_the_blocks_of_its_row_is_refused() -> None:
    """The global length where the rank's own one is meant, too."""
    context = ContextParallel(size=4, rank=1, interleave=1)
    limits = ServingLimits(
        max_model_len=1024, max_num_reqs=4, max_num_batched_tokens=8, context_parallel=context
    )
    (layout,) = plan_groups(limits, AttentionSpec(block_size=64))
    tables = StagedBlockTables([layout], device="cpu")
    tables.append_block_ids(0, [[5, 6]])
    tables.append_block_ids(2, [[7]])
    tables.step(batch_of([2, 0]))
    tables.append_block_ids(0, [[8]])

    with pytest.raises(RowOverflowError) as refused:
        tables.gather_csr(0, np.array([0, 512], np.int32), 2)

    text = str(refused.value)
    for part in ("512", "request 1 holds 2 blocks of 64", "128 tokens", "layout.local_length"):
        assert part in text
    assert refused.value.details == {
        "request": 1, "group": 0, "seq_len": 512, "held": 2, "capacity": 128,
    }  # fmt: skip
    assert tables.gather_csr(0, np.array([64, 128], np.int32), 2).indices.tolist() == [7, 5, 6]
    tables.step(batch_of([2, 0, 0]))
    longer = tables.gather_csr(0, np.array([0, 192, 129], np.int32), 3).indices.tolist()
    assert longer == [5, 6, 8] * 2
    with pytest.raises(RowOverflowError, match="request 3 holds 0 blocks"):
        tables.gather_csr(0, np.array([0, 0, 0, 1], np.int32), 4)
