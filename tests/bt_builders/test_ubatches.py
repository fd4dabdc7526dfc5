"""Micro-batches equal batches that were built alone."""

import random
from dataclasses import fields

import pytest
import torch
from tests.support.batches import Request, make_batch, rows_of
from tests.support.plans import plan, serving_limits

from bt_builders import (
    CommonAttentionMetadata,
    DSAIndexerMetadataBuilder,
    create_metadata_builders,
    split_ubatches,
)
from bt_width import AttentionSpec, BlockTableLayout, InvalidEditError

pytestmark = pytest.mark.fast


def assert_equal(ours: CommonAttentionMetadata, theirs: CommonAttentionMetadata) -> None:
    for field in fields(CommonAttentionMetadata):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == other.dtype, field.name
            assert mine.tolist() == other.tolist(), field.name
        else:
            assert mine == other, field.name


def cut_requests(
    layout: BlockTableLayout, requests: list[Request], first: int, last: int
) -> list[Request]:
    """The requests as an independent batch of the tokens [first, last) would list them."""
    parts = []
    start = 0
    for request, row in zip(requests, rows_of(layout, requests), strict=True):
        end = start + request.query_len
        begin, stop = max(start, first), min(end, last)
        if begin < stop:
            parts.append(
                Request(
                    request.num_computed + stop - start,
                    stop - begin,
                    tuple(row),
                    request.is_prefilling,
                    request.num_accepted if begin == start else 1,
                )
            )
        start = end
    return parts


def test_a_continuation_starts_where_the_first_part_ended() -> None:
    """24 computed tokens and 8 new ones, cut 4 / 4: the second part has 28 computed.

    Reported as https://github.com/vllm-project/vllm/pull/48659
    and https://github.com/vllm-project/vllm/pull/56031
    """
    layout = plan(AttentionSpec(block_size=16), 200)
    common = make_batch(layout, [Request(32, 8, is_prefilling=True)])

    first, second = split_ubatches(common, [4])

    assert (first.num_computed_tokens.tolist(), first.seq_lens.tolist()) == ([24], [28])
    assert (second.num_computed_tokens.tolist(), second.seq_lens.tolist()) == ([28], [32])
    assert second.positions.tolist() == [28, 29, 30, 31]
    assert second.is_prefilling.tolist() == [True]


@pytest.mark.parametrize("seed", range(20))
def test_slices_equal_independently_built_batches(seed: int) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/48659
    and https://github.com/vllm-project/vllm/pull/56031
    """
    draw = random.Random(seed)
    size, rank = draw.choice([(1, 0), (2, 1)])
    layout = plan(AttentionSpec(block_size=16), 120, size=size, rank=rank)
    requests = []
    for _ in range(draw.randint(1, 4)):
        query_len = draw.randint(1, 15)
        requests.append(
            Request(
                query_len + draw.randint(0, 100),
                query_len,
                is_prefilling=draw.random() < 0.5,
                num_accepted=draw.randint(1, 3),
            )
        )
    common = make_batch(layout, requests)
    cuts = sorted(draw.sample(range(1, common.num_tokens + 1), min(2, common.num_tokens)))

    parts = split_ubatches(common, cuts)

    bounds = [0, *cuts, common.num_tokens]
    for part, first, last in zip(parts, bounds, bounds[1:], strict=False):
        own = cut_requests(layout, requests, first, last)
        if own:
            assert_equal(part, make_batch(layout, own))
        else:
            assert (part.num_reqs, part.num_tokens, part.max_seq_len) == (0, 0, 0)
            assert part.max_query_len == common.max_query_len


def test_padding_rows_go_with_their_tokens() -> None:
    """Eight rows of one token, five of them requests: both halves keep their four rows."""
    limits = serving_limits(200, max_num_reqs=8)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=16), limits)
    requests = [Request(30 + n, 1) for n in range(5)]
    common = make_batch(layout, requests, num_reqs=8, num_tokens=8)

    first, second = split_ubatches(common, [4])

    rows = rows_of(layout, requests)
    alone = [Request(30 + n, 1, tuple(rows[n])) for n in range(5)]
    assert_equal(first, make_batch(layout, alone[:4]))
    assert_equal(second, make_batch(layout, alone[4:], num_reqs=4, num_tokens=4))


def test_a_cut_through_the_padding_shares_its_rows() -> None:
    limits = serving_limits(200, max_num_reqs=8)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=16), limits)
    common = make_batch(layout, [Request(30, 2), Request(31, 2)], num_reqs=8, num_tokens=16)

    parts = split_ubatches(common, [8, 10])

    assert [(part.num_reqs, part.num_tokens) for part in parts] == [(4, 8), (1, 2), (3, 6)]
    assert [part.seq_lens.tolist() for part in parts] == [[30, 31, 0, 0], [0], [0, 0, 0]]


def test_a_batch_of_padding_alone_is_cut_evenly() -> None:
    layout = plan(AttentionSpec(block_size=16), 200)
    common = make_batch(layout, [], num_reqs=4, num_tokens=8, max_query_len=2)

    parts = split_ubatches(common, [2])

    assert [(part.num_reqs, part.num_tokens) for part in parts] == [(1, 2), (3, 6)]


def test_a_half_of_padding_alone_is_a_dummy_batch() -> None:
    layout = plan(AttentionSpec(block_size=16), 200)
    common = make_batch(layout, [Request(30, 2), Request(31, 2)], num_reqs=4, num_tokens=8)

    _, second = split_ubatches(common, [4])

    assert (second.num_reqs, second.num_tokens, second.max_query_len) == (2, 4, 2)
    assert second.seq_lens.tolist() == second.num_computed_tokens.tolist() == [0, 0]
    assert second.slot_mapping.tolist() == [-1] * 4


def test_builders_of_micro_batches_share_nothing_that_changes() -> None:
    """Both micro-batches' metadata stands at once, each with its own lengths and rows.

    Reported as https://github.com/vllm-project/vllm/pull/48659
    and https://github.com/vllm-project/vllm/pull/56031
    """
    layout = plan(AttentionSpec(block_size=16, tokens_per_state=2), 200)
    builders = create_metadata_builders(layout, [DSAIndexerMetadataBuilder], "cpu", num_ubatches=2)
    parts = split_ubatches(make_batch(layout, [Request(60, 1), Request(35, 1)]), [1])

    metadata = [of[0].build(part) for of, part in zip(builders, parts, strict=True)]

    assert [each.decode.global_seq_lens.tolist() for each in metadata] == [[[60]], [[35]]]
    addresses = [
        {each.decode.seq_lens.data_ptr(), each.slot_mapping.data_ptr()} for each in metadata
    ]
    assert not addresses[0] & addresses[1]


@pytest.mark.parametrize("cuts", [[-1], [9], [4, 2]], ids=str)
def test_cuts_outside_the_batch_are_refused(cuts: list[int]) -> None:
    layout = plan(AttentionSpec(block_size=16), 200)
    common = make_batch(layout, [Request(32, 8)])

    with pytest.raises(InvalidEditError, match="must ascend"):
        split_ubatches(common, cuts)


def test_padding_rows_share_the_padding_tokens_among_themselves() -> None:
    """Two requests and two padding rows with six tokens: three each, whoever has real ones."""
    layout = plan(AttentionSpec(block_size=16), 200)
    common = make_batch(layout, [Request(32, 4), Request(20, 2)], num_reqs=4, num_tokens=12)

    parts = split_ubatches(common, [6, 9])

    assert [(part.num_reqs, part.num_tokens) for part in parts] == [(2, 6), (1, 3), (1, 3)]
    assert [part.seq_lens.tolist() for part in parts] == [[32, 20], [0], [0]]
