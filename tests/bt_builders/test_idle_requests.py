"""Requests without tokens in a step, anywhere in a batch: every builder builds around them."""

from itertools import product

import pytest
from tests.support.batches import Request, make_batch
from tests.support.plans import plan, serving_limits

from bt_builders import (
    DSAIndexerMetadata,
    DSAIndexerMetadataBuilder,
    DSAOptions,
    MambaMetadataBuilder,
    MLAMetadataBuilder,
    MLAOptions,
    pack_contexts,
    plan_prefill_chunks,
)
from bt_width import AttentionSpec, BlockTableLayout, InvalidSpecError, MambaSpec

pytestmark = pytest.mark.fast

SPEC = AttentionSpec(block_size=64)


def build_indexer(requests: list[Request]) -> DSAIndexerMetadata:
    layout = plan(SPEC, 200)
    options = DSAOptions(workspace_tokens=128)
    chosen = DSAIndexerMetadataBuilder.configured(options)
    builder = chosen(layout, "cpu", block_table_width=layout.width)
    return builder.build(make_batch(layout, requests))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("num_idle", [1, 2])
def test_a_request_without_tokens_is_in_no_chunk(place: int, num_idle: int) -> None:
    """Two that fill a workspace each, and one beside them with a context and nothing to score."""
    requests = [Request(128, 4, is_prefilling=True), Request(128, 4, is_prefilling=True)]
    requests[place:place] = [Request(20, 0, is_prefilling=True)] * num_idle

    metadata = build_indexer(requests)

    assert [chunk.num_tokens for chunk in metadata.prefill] == [4, 4]
    assert [chunk.num_reqs for chunk in metadata.prefill] == [1, 1]
    for chunk in metadata.prefill:
        assert requests[chunk.first_req].query_len == 4
        assert chunk.cu_seqlen_ks.tolist() == [0] * 4
        assert chunk.cu_seqlen_ke.tolist() == [125, 126, 127, 128]


def test_every_combination_of_empty_queries_and_contexts_is_built() -> None:
    """By all builders alike, in all orders: no tokens, one or four, after none, one or twenty."""
    kinds = [Request(c + q, q, is_prefilling=q > 0) for c, q in product((0, 1, 20), (0, 1, 4))]
    layout = plan(SPEC, 200)
    states = BlockTableLayout.plan(MambaSpec(block_size=16, mode="align"), serving_limits(200))
    mla = MLAMetadataBuilder.configured(MLAOptions(workspace_tokens=128))(layout, "cpu")
    chosen = DSAIndexerMetadataBuilder.configured(DSAOptions(workspace_tokens=128))
    dsa = chosen(layout, "cpu", block_table_width=layout.width)
    mamba = MambaMetadataBuilder(states, "cpu")
    for requests in product(kinds, repeat=3):
        common = make_batch(layout, requests)

        scored = sum(chunk.num_tokens for chunk in dsa.build(common).prefill)
        built = mla.build(common)

        assert scored + dsa.build(common).decode.num_tokens == common.num_tokens
        assert built.decode.num_tokens + built.prefill.num_tokens == common.num_tokens
        for chunk in built.prefill.context_chunks:
            first = built.prefill.first_req
            lens = chunk.cu_seq_lens.diff().tolist()
            assert all(
                request.query_len or not length
                for request, length in zip(requests[first:], lens, strict=False)
            )
        found = mamba.build(make_batch(states, requests))
        assert found.decode.num_tokens + found.prefill.num_tokens == common.num_tokens


@pytest.mark.parametrize(
    ("queries", "keys", "max_keys", "max_scores"),
    [
        ([1], [1, 2], 8, 8),
        ([-1], [1], 8, 8),
        ([1], [1], 0, 8),
        ([1], [1], 8, 0),
        ([True], [1], 8, 8),
    ],
    ids=["another-length", "negative", "no-keys", "no-scores", "a-bool"],
)
def test_chunks_of_what_is_no_batch_are_refused(
    queries: list[int], keys: list[int], max_keys: int, max_scores: int
) -> None:
    with pytest.raises(InvalidSpecError):
        plan_prefill_chunks(queries, keys, max_keys, max_scores)


def test_rounds_over_all_ranks_count_when_contexts_are_packed() -> None:
    """5 tokens take two rounds of four: with 3 more the ranks' rows would not fit into eight."""
    chunks = pack_contexts([5, 3], 8, unit=4, turn=4)

    assert [[span.length for span in chunk] for chunk in chunks] == [[5], [3]]


def test_a_context_that_neither_fits_nor_can_be_cut_is_refused() -> None:
    assert pack_contexts([100, 128], 128, unit=256, turn=2) != []
    with pytest.raises(InvalidSpecError, match="must be at least 256"):
        pack_contexts([129], 128, unit=256, turn=2)


@pytest.mark.parametrize("max_model_len", [128, 127])
def test_a_workspace_that_holds_every_context_need_not_hold_a_cut(max_model_len: int) -> None:
    """Two ranks, blocks of 128: contexts of at most 128 tokens are never cut."""
    layout = plan(AttentionSpec(block_size=128), max_model_len, size=2)
    chosen = MLAMetadataBuilder.configured(MLAOptions(workspace_tokens=128))

    prefill = (
        chosen(layout, "cpu")
        .build(make_batch(layout, [Request(max_model_len, 4, is_prefilling=True)]))
        .prefill
    )

    (chunk,) = prefill.context_chunks
    assert chunk.num_tokens == max_model_len - 4


def test_a_workspace_too_small_for_contexts_is_refused_with_the_value_that_would_do() -> None:
    layout = plan(AttentionSpec(block_size=128), 200, size=2)

    with pytest.raises(InvalidSpecError, match=r"MLAOptions\.workspace_tokens .* at least 200"):
        MLAMetadataBuilder.configured(MLAOptions(workspace_tokens=128))(layout, "cpu")


def test_a_context_fits_only_with_its_last_round() -> None:
    """5 tokens are two rounds of four, which a workspace of 6 does not hold."""
    chunks = pack_contexts([5], 6, unit=4, turn=4)

    assert [[span.length for span in chunk] for chunk in chunks] == [[4], [1]]
