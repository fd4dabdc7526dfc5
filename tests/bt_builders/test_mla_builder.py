"""MLA's parts: who decodes, how long each token's context is, and what prefills."""

import pytest
import torch
from tests.support.batches import Request, make_batch
from tests.support.plain_builders import tokens_of
from tests.support.plans import serving_limits

from bt_builders import MLAMetadata, MLAMetadataBuilder, MLAOptions
from bt_width import AttentionSpec, BlockTableLayout, InvalidSpecError, RingSpec

pytestmark = pytest.mark.fast


def plan_mla(*, size: int = 1, rank: int = 0, interleave: int = 1) -> BlockTableLayout:
    limits = serving_limits(
        300,
        max_num_reqs=8,
        max_num_batched_tokens=64,
        num_speculative_tokens=3,
        size=size,
        rank=rank,
        interleave=interleave,
    )
    return BlockTableLayout.plan(AttentionSpec(block_size=16), limits)


def build(
    layout: BlockTableLayout, requests: list[Request], options: MLAOptions | None = None
) -> MLAMetadata:
    builder = MLAMetadataBuilder.configured(options or MLAOptions())(layout, "cpu")
    return builder.build(make_batch(layout, requests))


def test_ragged_decodes_stay_decodes() -> None:
    metadata = build(plan_mla(), [Request(40, 4), Request(30, 1), Request(50, 2)])

    assert (metadata.num_decodes, metadata.num_prefills) == (3, 0)
    assert not metadata.decode.is_uniform
    assert metadata.decode.max_query_len == 4


def test_a_uniform_kernel_gets_equal_query_lengths_only() -> None:
    requests = [Request(40, 2), Request(30, 2), Request(50, 1)]

    metadata = build(plan_mla(), requests, MLAOptions(uniform_decodes=True))

    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert metadata.decode.is_uniform
    assert metadata.prefill.query_start_loc.tolist() == [0, 1]


def test_the_threshold_is_the_backends() -> None:
    requests = [Request(40, 8), Request(30, 9)]

    metadata = build(plan_mla(), requests, MLAOptions(max_decode_query_len=8))

    assert (metadata.num_decodes, metadata.num_prefills) == (1, 1)


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 1), (3, 8)], ids=str)
def test_lengths_are_this_ranks_token_by_token(size: int, interleave: int) -> None:
    requests = [Request(40, 4), Request(3, 1), Request(50, 2)]
    for rank in range(size):
        layout = plan_mla(size=size, rank=rank, interleave=interleave)

        decode = build(layout, requests).decode

        expected = [layout.local_length(position + 1) for _, position in tokens_of(requests)]
        assert decode.token_seq_lens.tolist() == expected
        assert decode.seq_lens.tolist() == [layout.local_length(n) for n in (40, 3, 50)]
        assert max(expected) <= decode.max_seq_len


def test_the_maximum_is_one_number_on_all_ranks() -> None:
    layouts = [plan_mla(size=4, rank=rank, interleave=16) for rank in range(4)]

    bounds = {build(layout, [Request(70, 1)]).decode.max_seq_len for layout in layouts}

    assert bounds == {22}


def test_a_batch_that_only_decodes_has_an_empty_prefill() -> None:
    prefill = build(plan_mla(), [Request(40, 4), Request(30, 1)]).prefill

    assert (prefill.num_reqs, prefill.num_tokens, prefill.max_query_len) == (0, 0, 0)
    assert prefill.query_start_loc.tolist() == [0]
    assert prefill.block_table.shape[0] == prefill.context_lens.numel() == 0
    assert prefill.context_chunks == ()


def test_padding_rows_behind_prompts_are_no_requests() -> None:
    layout = plan_mla()
    prompts = [Request(50, 20, is_prefilling=True), Request(30, 10, is_prefilling=True)]
    common = make_batch(layout, [Request(40, 1), *prompts], num_reqs=6, num_tokens=40)

    prefill = MLAMetadataBuilder(layout, "cpu").build(common).prefill

    assert (prefill.num_reqs, prefill.num_tokens, prefill.max_query_len) == (2, 30, 20)
    assert prefill.query_start_loc.tolist() == [0, 20, 30]
    assert [chunk.cu_seq_lens.tolist() for chunk in prefill.context_chunks] == [[0, 30, 50]]


def test_both_parts_are_slices_of_the_batch() -> None:
    layout = plan_mla()
    requests = [
        Request(40, 2),
        Request(30, 1),
        Request(50, 20, is_prefilling=True),
        Request(9, 9, is_prefilling=True),
    ]
    common = make_batch(layout, requests)

    metadata = MLAMetadataBuilder(layout, "cpu").build(common)

    assert torch.equal(metadata.decode.block_table, common.block_table[:2])
    assert torch.equal(metadata.prefill.block_table, common.block_table[2:])
    assert metadata.decode.query_start_loc.tolist() == [0, 2, 3]
    assert metadata.prefill.query_start_loc.tolist() == [0, 20, 29]
    assert (metadata.prefill.first_req, metadata.prefill.first_token) == (2, 3)
    assert metadata.prefill.context_lens.tolist() == [30, 0]
    assert metadata.slot_mapping is common.slot_mapping
    assert metadata.kernel_block_size == 16


@pytest.mark.parametrize("num_prefills", range(4))
@pytest.mark.parametrize("num_decodes", range(4))
def test_every_number_of_requests_is_cut_in_its_parts(num_decodes: int, num_prefills: int) -> None:
    layout = plan_mla()
    decodes = [Request(40 + row, 2) for row in range(num_decodes)]
    prompts = [Request(30, 7 + row, is_prefilling=True) for row in range(num_prefills)]

    metadata = build(layout, decodes + prompts)

    decode, prefill = metadata.decode, metadata.prefill
    assert (metadata.num_decodes, metadata.num_prefills) == (num_decodes, num_prefills)
    assert (decode.num_tokens, decode.max_query_len) == (2 * num_decodes, 2 * (num_decodes > 0))
    assert decode.query_start_loc.tolist() == list(range(0, 2 * num_decodes + 1, 2))
    assert decode.seq_lens.tolist() == list(range(40, 40 + num_decodes))
    assert (prefill.first_req, prefill.num_reqs) == (num_decodes, num_prefills)
    assert prefill.first_token == 2 * num_decodes
    assert prefill.num_tokens == [0, 7, 15, 24][num_prefills]
    assert prefill.max_query_len == [0, 7, 8, 9][num_prefills]
    assert prefill.query_start_loc.tolist() == [0, 7, 15, 24][: num_prefills + 1]
    assert prefill.context_lens.tolist() == [23, 22, 21][:num_prefills]


def test_padding_rows_see_nothing() -> None:
    """Reported as https://github.com/local-inference-lab/vllm/issues/621
    and https://github.com/sgl-project/sglang/pull/10892
    """
    layout = plan_mla()
    builder = MLAMetadataBuilder(layout, "cpu")
    builder.build(make_batch(layout, [Request(90, 4)] * 4))

    padded = make_batch(layout, [Request(50, 4)], num_reqs=3, num_tokens=12)
    decode = builder.build(padded).decode

    assert decode.is_uniform
    assert decode.seq_lens.tolist() == [50, 0, 0]
    assert decode.token_seq_lens.tolist() == [47, 48, 49, 50] + [0] * 8


def test_padding_past_the_most_decode_tokens_is_left_out() -> None:
    """A pure decode batch that was padded as a prefill would be is no error."""
    layout = plan_mla()
    common = make_batch(layout, [Request(20, 1)], num_tokens=33)

    decode = MLAMetadataBuilder(layout, "cpu").build(common).decode

    assert (decode.num_tokens, decode.is_uniform) == (32, False)
    assert decode.token_seq_lens.tolist() == [20] + [0] * 31


def test_a_group_that_keeps_no_token_is_refused() -> None:
    layout = BlockTableLayout.plan(RingSpec(block_size=16), serving_limits(64))

    with pytest.raises(InvalidSpecError, match="every token's latent"):
        MLAMetadataBuilder(layout, "cpu")


@pytest.mark.parametrize("name", ["workspace_tokens", "max_decode_query_len"])
def test_a_size_that_holds_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidSpecError, match=name):
        MLAOptions(**{name: 0})  # type: ignore[arg-type]  # fields of ints, by name
