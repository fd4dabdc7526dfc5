"""The indexer's decodes: plain, native and flattened rows stand for the same tokens."""

import random
from dataclasses import replace

import pytest
import torch
from tests.support.batches import Request, make_batch
from tests.support.plain_builders import (
    expected_pairs,
    random_decodes,
    selected_pairs,
    state_addresses,
    tokens_of,
)
from tests.support.plans import serving_limits
from tests.support.poison import POISON

from bt_builders import DSAIndexerMetadata, DSAIndexerMetadataBuilder, DSAOptions
from bt_width import (
    NULL_BLOCK,
    AttentionSpec,
    BlockTableLayout,
    InvalidEditError,
    index_buffer_bytes,
)

pytestmark = pytest.mark.fast

NATIVE = DSAOptions(native_query_lens=frozenset({1, 2, 3, 4}))
FLATTENED = DSAOptions(native_query_lens=frozenset({1}))


def plan_indexer(
    *,
    block_size: int = 16,
    kernel_block_size: int | None = None,
    tokens_per_state: int = 1,
    size: int = 1,
    rank: int = 0,
    interleave: int = 1,
    max_model_len: int = 150,
) -> BlockTableLayout:
    limits = serving_limits(
        max_model_len,
        max_num_reqs=8,
        max_num_batched_tokens=64,
        num_speculative_tokens=3,
        size=size,
        rank=rank,
        interleave=interleave,
    )
    spec = AttentionSpec(block_size=block_size, tokens_per_state=tokens_per_state)
    return BlockTableLayout.plan(spec, limits, kernel_block_size)


def make_builder(
    layout: BlockTableLayout, options: DSAOptions = FLATTENED
) -> DSAIndexerMetadataBuilder:
    builder_class = DSAIndexerMetadataBuilder.configured(options)
    return builder_class(layout, "cpu", block_table_width=layout.width)


def build(
    layout: BlockTableLayout, requests: list[Request], options: DSAOptions = FLATTENED
) -> DSAIndexerMetadata:
    return make_builder(layout, options).build(make_batch(layout, requests))


def test_each_token_has_its_own_length() -> None:
    """[100, 65, 64] with 4, 1 and 3 tokens: the last token sees all, the one before it one less.

    Reported as https://github.com/wtdcode/vllm-backport/pull/49
    """
    layout = plan_indexer()

    decode = build(layout, [Request(100, 4), Request(65, 1), Request(64, 3)]).decode

    assert decode.seq_lens.flatten().tolist() == [97, 98, 99, 100, 65, 62, 63, 64]


def test_padding_rows_have_length_0_and_a_null_row() -> None:
    """118 requests and 128 decode tokens: ten rows look like nothing, not like a request.

    Reported as https://github.com/wtdcode/vllm-backport/pull/49
    """
    limits = serving_limits(300, max_num_reqs=128, max_num_batched_tokens=256)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=16), limits)
    requests = [Request(200 + index % 7, 1) for index in range(118)]
    builder = make_builder(layout)
    builder.build(make_batch(layout, [Request(250, 1)] * 128))

    decode = builder.build(make_batch(layout, requests, num_tokens=128)).decode

    assert decode.seq_lens.shape[0] == decode.block_table.shape[0] == 128
    assert decode.seq_lens[118:].count_nonzero() == 0
    assert (decode.block_table[118:] == NULL_BLOCK).all()


@pytest.mark.parametrize(
    ("query_lens", "options", "form"),
    [
        pytest.param([1, 1, 1], NATIVE, "plain", id="one-token-each"),
        pytest.param([2, 2, 2], NATIVE, "native", id="uniform-and-native"),
        pytest.param([2, 2, 2], FLATTENED, "flattened", id="uniform-not-native"),
        pytest.param([1, 4, 2], NATIVE, "flattened", id="ragged"),
        pytest.param([3], NATIVE, "native", id="one-request"),
    ],
)
def test_the_form_follows_the_batch_and_the_kernel(
    query_lens: list[int], options: DSAOptions, form: str
) -> None:
    requests = [Request(40 + query_len, query_len) for query_len in query_lens]

    decode = build(plan_indexer(), requests, options).decode

    assert decode.form == form
    assert decode.num_tokens == sum(query_lens)


@pytest.mark.parametrize("tokens_per_state", [1, 4])
@pytest.mark.parametrize(("size", "rank", "interleave"), [(1, 0, 1), (2, 1, 8), (3, 0, 4)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_all_forms_see_what_each_token_may_see(
    tokens_per_state: int, size: int, rank: int, interleave: int, seed: int
) -> None:
    """Native, flattened uniform and ragged rows equal the token-by-token reference.

    Columns past what a request's length needs hold poison, so that one read or copied
    too many is a position that no request has.
    """
    draw = random.Random(seed)
    layout = plan_indexer(
        kernel_block_size=8,
        tokens_per_state=tokens_per_state,
        size=size,
        rank=rank,
        interleave=interleave,
    )
    uniform = draw.randint(1, 4)
    batches = [[draw.randint(1, 4) for _ in range(5)], [uniform] * 5]
    for query_lens in batches:
        requests = random_decodes(draw, layout, query_lens)
        common = make_batch(layout, requests)
        for row, request in enumerate(requests):
            needed = -(-layout.local_length(request.seq_len) // layout.kernel_block_size)
            common.block_table[row, needed:] = POISON
        addresses = state_addresses(layout, requests, tokens_per_state)
        expected = expected_pairs(layout, requests, tokens_per_state)
        for options in (NATIVE, FLATTENED):
            metadata = make_builder(layout, options).build(common)

            pairs = selected_pairs(metadata.decode, addresses, metadata.states_per_kernel_block)

            assert pairs == expected


@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
def test_lengths_and_rows_agree_at_every_block_size(block_size: int) -> None:
    """A block of one token hides a token taken for a block; larger ones do not.

    Reported as https://github.com/ROCm/aiter/pull/4440
    and https://github.com/sgl-project/sglang/pull/38187
    and https://github.com/sgl-project/sglang/pull/31218
    """
    layout = plan_indexer(block_size=block_size, max_model_len=600)
    requests = random_decodes(random.Random(block_size), layout, [2, 1, 4])
    metadata = build(layout, requests)

    pairs = selected_pairs(
        metadata.decode, state_addresses(layout, requests), metadata.states_per_kernel_block
    )

    assert pairs == expected_pairs(layout, requests)


def test_localising_comes_after_expansion() -> None:
    """Global lengths 8, 9, 10 are 4, 4, 5 on rank 1 of 2; localised first they were 3, 4, 5."""
    layout = plan_indexer(size=2, rank=1)

    decode = build(layout, [Request(10, 3)]).decode

    assert decode.global_seq_lens.flatten().tolist() == [8, 9, 10]
    assert decode.seq_lens.flatten().tolist() == [4, 4, 5]


def test_compressed_lengths_count_complete_states() -> None:
    layout = plan_indexer(tokens_per_state=4)

    decode = build(layout, [Request(9, 3)]).decode

    assert decode.seq_lens.flatten().tolist() == [1, 2, 2]


def test_rows_are_copied_as_far_as_they_live() -> None:
    """A fresh buffer full of poison changes in the live columns only."""
    layout = plan_indexer(max_model_len=1000)
    builder = make_builder(layout)
    rows = builder._rows.buffers
    rows.table.fill_(POISON)

    decode = builder.build(make_batch(layout, [Request(40, 2), Request(17, 1)])).decode

    written = (decode.block_table != POISON).sum(dim=1).tolist()
    assert written == [3, 3, 2]


def test_rows_are_cleared_to_their_high_water_mark() -> None:
    """What a longer request left in a row is null when a shorter one comes."""
    layout = plan_indexer(max_model_len=1000)
    builder = make_builder(layout)
    builder.build(make_batch(layout, [Request(900, 2), Request(30, 1)]))

    decode = builder.build(make_batch(layout, [Request(20, 1), Request(31, 2)])).decode

    expected = make_batch(layout, [Request(20, 1), Request(31, 2)]).block_table[[0, 1, 1]]
    assert torch.equal(decode.block_table, expected)


def test_many_batches_leave_no_tail() -> None:
    """Random batches through one builder: every row equals the row it copies, to the end."""
    draw = random.Random(7)
    layout = plan_indexer(kernel_block_size=8, max_model_len=400)
    builder = make_builder(layout)
    for _ in range(40):
        query_lens = [draw.randint(0, 4) for _ in range(draw.randint(1, 8))]
        requests = random_decodes(draw, layout, query_lens)
        padding = draw.randint(0, 4)
        num_tokens = min(sum(query_lens) + padding, 32)
        common = make_batch(layout, requests, num_tokens=num_tokens)

        table = builder.build(common).decode.block_table

        live = torch.zeros_like(table)
        for token, (owner, position) in enumerate(tokens_of(requests)):
            columns = -(-(position + 1) // layout.kernel_block_size)
            live[token, :columns] = common.block_table[owner, :columns]
        if builder.build(common).decode.form == "flattened":
            assert torch.equal(table, live)


def test_neither_form_truncates_or_mixes_rows() -> None:
    """A table twice as wide is refused for uniform and for ragged batches; buffers stay.

    Reported as https://github.com/vllm-project/vllm/pull/48404
    """
    layout = plan_indexer()
    builder = make_builder(layout)
    rows = builder._rows.buffers
    rows.table.fill_(POISON)
    for requests in ([Request(40, 2)] * 3, [Request(40, 2), Request(41, 3), Request(9, 1)]):
        common = make_batch(layout, requests)
        wide = torch.cat([common.block_table, common.block_table], dim=1)

        with pytest.raises(ValueError, match="planned was"):
            builder.build(replace(common, block_table=wide))

        assert (rows.table == POISON).all()


@pytest.mark.parametrize("columns", [1, 10], ids=["one-column", "two-columns-less"])
def test_field_3_7_a_copy_never_trusts_the_wrong_width(columns: int) -> None:
    """Engines copied by the destination's width, and broadcast a table of one column."""
    layout = plan_indexer()
    builder = make_builder(layout)
    common = make_batch(layout, [Request(40, 2), Request(41, 3)])

    with pytest.raises(ValueError, match="block_table has shape"):
        builder.build(replace(common, block_table=common.block_table[:, :columns].contiguous()))


@pytest.mark.parametrize("num_drafts", range(6))
def test_decode_buffers_take_their_rows_from_one_function(num_drafts: int) -> None:
    """T 80, R 12, k drafts: buffers hold 80 + 48 tokens, and the step's limit is exact.

    Reported as https://github.com/vllm-project/vllm-ascend/issues/13710
    and https://github.com/vllm-project/vllm-ascend/pull/14024
    """
    limits = serving_limits(
        256, max_num_reqs=12, max_num_batched_tokens=128, num_speculative_tokens=num_drafts
    )
    layout = BlockTableLayout.plan(AttentionSpec(block_size=16), limits)
    builder = make_builder(layout)

    assert builder._rows.buffers.table.nbytes == index_buffer_bytes(layout)
    assert builder._slots.numel() == 128
    with pytest.raises(InvalidEditError, match="not 129"):
        builder.build(make_batch(layout, [Request(20, 1)], num_tokens=129))


def test_padding_past_the_most_decode_tokens_is_left_out() -> None:
    """A pure decode batch that was padded as a prefill would be is no error."""
    layout = plan_indexer()

    metadata = make_builder(layout).build(make_batch(layout, [Request(20, 1)], num_tokens=33))

    assert metadata.decode.num_tokens == 32
    assert metadata.decode.seq_lens.flatten().tolist() == [20] + [0] * 31
    assert metadata.slot_mapping[1:].tolist() == [-1] * 32


def test_an_empty_batch_has_no_rows() -> None:
    metadata = build(plan_indexer(), [])

    assert metadata.decode.block_table.shape[0] == metadata.decode.seq_lens.shape[0] == 0
    assert metadata.prefill == ()


def test_a_verify_step_at_the_wall_fits_with_lookahead() -> None:
    """Drafts past the longest request have columns where they were planned for.

    Reported as https://github.com/sgl-project/sglang/pull/19016
    and https://github.com/sgl-project/sglang/pull/19641
    and https://github.com/sgl-project/sglang/pull/29665
    and https://github.com/sgl-project/sglang/pull/35985
    """
    limits = serving_limits(
        64, max_num_reqs=2, max_num_batched_tokens=8, num_speculative_tokens=2, lookahead_tokens=2
    )
    spec = AttentionSpec(block_size=1, token_alignment=None)
    layout = BlockTableLayout.plan(spec, limits)

    decode = build(layout, [Request(66, 3)]).decode

    assert layout.width == 66
    assert decode.block_table[2].tolist() == list(range(1, 67))


def test_a_length_past_the_row_is_clamped_and_never_written() -> None:
    """Without lookahead, what lies past the row is not copied, whatever the length says.

    Reported as https://github.com/sgl-project/sglang/pull/19016
    and https://github.com/sgl-project/sglang/pull/19641
    and https://github.com/sgl-project/sglang/pull/29665
    and https://github.com/sgl-project/sglang/pull/35985
    """
    layout = plan_indexer(max_model_len=64)
    common = make_batch(layout, [Request(64, 2), Request(20, 1)])
    builder = make_builder(layout)
    whole = builder._rows.buffers.table

    common.seq_lens[0] = layout.limits.max_model_len * 4
    builder.build(common)

    assert (whole[3:] == 0).all()
    assert whole[0].tolist() == whole[1].tolist() == common.block_table[0].tolist()


def test_a_padded_batch_after_a_larger_one_equals_a_fresh_one() -> None:
    """Batch 3 padded to 4 rows, after batch 4: row 3 has no table, no length, no slot.

    Reported as https://github.com/local-inference-lab/vllm/issues/621
    and https://github.com/sgl-project/sglang/pull/10892
    """
    layout = plan_indexer()
    used, fresh = make_builder(layout), make_builder(layout)
    used.build(make_batch(layout, [Request(90 + n, 4) for n in range(4)]))
    requests = [Request(50 + n, 4) for n in range(3)]
    common = make_batch(layout, requests, num_reqs=4, num_tokens=16)

    ours, theirs = used.build(common), fresh.build(common)

    assert torch.equal(ours.decode.block_table, theirs.decode.block_table)
    assert torch.equal(ours.decode.seq_lens, theirs.decode.seq_lens)
    assert ours.decode.block_table[12:].count_nonzero() == 0
    assert ours.decode.seq_lens[12:].count_nonzero() == 0
    assert (ours.slot_mapping[12:] == -1).all()


def test_a_padded_uniform_batch_stays_native() -> None:
    """A graph's shape does not depend on how many of its rows are padding."""
    layout = plan_indexer()
    requests = [Request(50 + n, 4) for n in range(3)]

    decode = (
        make_builder(layout, NATIVE)
        .build(make_batch(layout, requests, num_reqs=5, num_tokens=20))
        .decode
    )

    assert decode.form == "native"
    assert decode.seq_lens.tolist()[3:] == [[0] * 4] * 2


def test_a_table_with_wide_rows_is_read_by_its_stride() -> None:
    """A table that is a slice of a wider one is as good as a compact one."""
    layout = plan_indexer()
    common = make_batch(layout, [Request(40, 2), Request(41, 3)])
    wide = torch.full((2, layout.width + 3), POISON, dtype=torch.int32)
    wide[:, : layout.width] = common.block_table
    strided = replace(common, block_table=wide[:, : layout.width])

    expected = make_builder(layout).build(common).decode.block_table

    assert torch.equal(make_builder(layout).build(strided).decode.block_table, expected)
