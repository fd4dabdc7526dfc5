"""A step's batch from lengths and tables: the same as one written token by token."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from tests.support.batches import Request, make_batch
from tests.support.plans import serving_limits

from bt_builders import AttentionBatch, CommonAttentionMetadata
from bt_tables import StagedBlockTables, StepBatch
from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    ContextParallel,
    InvalidEditError,
    InvalidSpecError,
    MambaSpec,
    RingSpec,
    ServingLimits,
)

pytestmark = pytest.mark.fast

REQUESTS = [
    Request(30, 3, block_ids=(4, 9), num_accepted=2),
    Request(17, 17, block_ids=(5, 6), is_prefilling=True),
]


def plans() -> list[BlockTableLayout]:
    limits = ServingLimits(
        max_model_len=64,
        max_num_reqs=4,
        max_num_batched_tokens=32,
        num_speculative_tokens=2,
        context_parallel=ContextParallel(size=2, rank=1, interleave=4),
    )
    specs = (
        AttentionSpec(block_size=16),
        MambaSpec(block_size=16, mode="align", num_speculative_blocks=2),
        RingSpec(block_size=4),
    )
    return [BlockTableLayout.plan(spec, limits) for spec in specs]


def batch_of(requests: list[Request], **padded: int) -> AttentionBatch:
    return AttentionBatch.from_lengths(
        [request.num_computed for request in requests],
        np.array([request.query_len for request in requests]),
        [request.is_prefilling for request in requests],
        "cpu",
        num_accepted_tokens=torch.tensor([request.num_accepted for request in requests]),
        **padded,
    )


@pytest.mark.parametrize(("num_reqs", "num_tokens"), [(2, 20), (4, 27)], ids=["exact", "padded"])
def test_from_step_gives_each_group_what_a_batch_by_hand_holds(
    num_reqs: int, num_tokens: int
) -> None:
    layouts = plans()
    ids = [[1, 2], [1, 2, 3, 4], [1]]
    more = [[3, 4], [5, 6, 7, 8], [2]]
    requests = [REQUESTS[0], REQUESTS[1]]
    tables = StagedBlockTables(layouts, device="cpu", num_blocks=[16, 16, 16])
    tables.append_block_ids(0, ids)
    tables.append_block_ids(1, more)
    batch = batch_of(requests, num_reqs_padded=num_reqs, num_tokens_padded=num_tokens)

    step = tables.step(
        StepBatch(
            idx_mapping=torch.tensor([0, 1] + [-1] * (num_reqs - 2), dtype=torch.int32),
            query_start_loc=batch.query_start_loc_host,
            positions=batch.positions,
            num_reqs_padded=num_reqs,
            num_tokens_padded=num_tokens,
        )
    )
    for group, layout in enumerate(layouts):
        found = CommonAttentionMetadata.from_step(layout, step, group, batch)

        theirs = [
            Request(30, 3, tuple(ids[group]), num_accepted=2),
            Request(17, 17, tuple(more[group]), is_prefilling=True),
        ]
        expected = make_batch(layout, theirs, num_reqs=num_reqs, num_tokens=num_tokens)
        assert found.layout is layout
        for field in fields(CommonAttentionMetadata):
            value, wanted = getattr(found, field.name), getattr(expected, field.name)
            if field.name == "positions":
                value, wanted = value[:20], wanted[:20]
            if isinstance(value, torch.Tensor):
                assert value.dtype == wanted.dtype, field.name
                assert value.tolist() == wanted.tolist(), field.name
            elif field.name != "layout":
                assert value == wanted, field.name


def test_a_batch_without_requests_is_a_batch() -> None:
    batch = batch_of([])

    assert (batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (0,) * 4
    assert batch.query_start_loc_host.tolist() == [0]


@pytest.mark.parametrize(
    ("computed", "queries", "prefilling", "message"),
    [
        ([1, 2], [1], [False, False], "query_lens has 1 entries"),
        ([1, 2], [1, 1], [False], "is_prefilling has 1 entries"),
        ([1.5, 2], [1, 1], [False, False], "num_computed_tokens must be a list or an array"),
        ([[1]], [1], [False], "with one dimension"),
        ([-1], [1], [False], "num_computed_tokens must hold counts"),
        ([1], [2**31], [False], "query_lens must hold counts"),
    ],
    ids=["short", "short-flags", "floats", "two-dimensions", "negative", "large"],
)
def test_lengths_that_are_no_batch_are_refused(
    computed: list[int], queries: list[int], prefilling: list[bool], message: str
) -> None:
    with pytest.raises(InvalidEditError, match=message):
        AttentionBatch.from_lengths(computed, queries, prefilling, "cpu")


@pytest.mark.parametrize("name", ["num_reqs_padded", "num_tokens_padded"])
def test_a_padded_count_below_the_real_one_is_refused(name: str) -> None:
    with pytest.raises(InvalidEditError, match=f"{name} must be an int of at least"):
        batch_of(REQUESTS, **{name: 1})


@pytest.mark.parametrize("group", [-1, 1, True], ids=str)
def test_a_group_that_the_tables_do_not_have_is_refused(group: int) -> None:
    layout = BlockTableLayout.plan(AttentionSpec(block_size=16), serving_limits(64))
    tables = StagedBlockTables([layout], device="cpu")
    batch = batch_of([])
    step = tables.step(
        StepBatch(
            idx_mapping=torch.zeros(0, dtype=torch.int32),
            query_start_loc=batch.query_start_loc_host,
            positions=batch.positions,
            num_reqs_padded=0,
            num_tokens_padded=0,
        )
    )

    with pytest.raises(InvalidSpecError, match=r"group must be an int in 0\.\.0"):
        CommonAttentionMetadata.from_step(layout, step, group, batch)


def test_from_step_refuses_what_is_no_batch_and_no_tables() -> None:
    layout = BlockTableLayout.plan(AttentionSpec(block_size=16), serving_limits(64))

    with pytest.raises(InvalidSpecError, match="batch must be an AttentionBatch, not dict"):
        CommonAttentionMetadata.from_step(layout, None, 0, {})  # type: ignore[arg-type]  # the fault under test
    with pytest.raises(InvalidSpecError, match="tables must be StepTables, not NoneType"):
        CommonAttentionMetadata.from_step(layout, None, 0, batch_of([]))  # type: ignore[arg-type]  # the fault under test
