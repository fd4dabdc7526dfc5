"""The indexer's prefills: chunks within two budgets, and what each token sees in a workspace."""

import random
from dataclasses import replace

import pytest
import torch
from tests.support.batches import Request, make_batch
from tests.support.plain_builders import Pair, expected_pairs, state_addresses
from tests.support.plans import serving_limits

from bt_builders import (
    ChunkPlan,
    DSAIndexerMetadata,
    DSAIndexerMetadataBuilder,
    DSAOptions,
    plan_prefill_chunks,
)
from bt_width import AttentionSpec, BlockTableLayout, InvalidSpecError, UniformSpec

pytestmark = pytest.mark.fast


def plan_indexer(
    *,
    tokens_per_state: int = 1,
    size: int = 1,
    rank: int = 0,
    interleave: int = 1,
    max_model_len: int = 400,
) -> BlockTableLayout:
    limits = serving_limits(
        max_model_len,
        max_num_reqs=8,
        max_num_batched_tokens=512,
        size=size,
        rank=rank,
        interleave=interleave,
    )
    spec = AttentionSpec(block_size=16, tokens_per_state=tokens_per_state)
    return BlockTableLayout.plan(spec, limits)


def build(
    layout: BlockTableLayout, requests: list[Request], options: DSAOptions | None = None
) -> DSAIndexerMetadata:
    builder_class = DSAIndexerMetadataBuilder.configured(options or DSAOptions())
    builder = builder_class(layout, "cpu", block_table_width=layout.width)
    return builder.build(make_batch(layout, requests))


def prompt(seq_len: int, query_len: int) -> Request:
    return Request(seq_len, query_len, is_prefilling=True)


def selected_in_chunks(
    metadata: DSAIndexerMetadata, addresses: dict[int, tuple[int, int]], layout: BlockTableLayout
) -> set[Pair]:
    """What the chunks make a kernel read, gathering the workspace key by key."""
    per_column = metadata.states_per_kernel_block
    pairs: set[Pair] = set()
    workspace: list[tuple[int, int]] = []
    for chunk in metadata.prefill:
        if chunk.gathers_keys:
            starts = chunk.cu_seq_lens.tolist()
            workspace = []
            for req in range(chunk.num_reqs):
                ids = chunk.block_table[req].tolist()
                for state in range(starts[req + 1] - starts[req]):
                    column, offset = divmod(state, per_column)
                    workspace.append(addresses[ids[column] * per_column + offset])
        assert len(workspace) <= chunk.num_keys
        bounds = zip(chunk.cu_seqlen_ks.tolist(), chunk.cu_seqlen_ke.tolist(), strict=True)
        for token, (first, last) in enumerate(bounds):
            for owner, position in workspace[first:last]:
                assert owner == chunk.first_req + int(chunk.token_to_req[token])
                pairs.add((chunk.first_token + token, owner, position))
    return pairs


def test_requests_are_packed_while_keys_and_scores_fit() -> None:
    plans = plan_prefill_chunks([10, 10, 10], [40, 50, 60], max_keys=100, max_scores=10_000)

    assert plans == [ChunkPlan(0, 2, 0, 20, 90, True), ChunkPlan(2, 1, 20, 10, 60, True)]


def test_budgets_may_be_filled_to_the_last_key_and_score() -> None:
    assert len(plan_prefill_chunks([10, 10], [40, 60], max_keys=100, max_scores=2000)) == 1
    assert len(plan_prefill_chunks([10, 10], [40, 60], max_keys=99, max_scores=2000)) == 2
    assert len(plan_prefill_chunks([10, 10], [40, 60], max_keys=100, max_scores=1999)) == 2


def test_scores_count_every_token_against_every_key() -> None:
    """Two requests of 10 tokens and 40 keys are 20 x 80 scores together, not 2 x 400."""
    plans = plan_prefill_chunks([10, 10], [40, 40], max_keys=100, max_scores=1599)

    assert [plan.num_reqs for plan in plans] == [1, 1]


def test_one_oversize_request_is_cut_by_its_tokens() -> None:
    """Its keys are gathered once."""
    plans = plan_prefill_chunks([10], [100], max_keys=1000, max_scores=350)

    assert [(plan.first_token, plan.num_tokens) for plan in plans] == [
        (0, 3), (3, 3), (6, 3), (9, 1),
    ]  # fmt: skip
    assert [plan.gathers_keys for plan in plans] == [True, False, False, False]


def test_a_request_larger_than_the_workspace_stands_alone() -> None:
    plans = plan_prefill_chunks([5, 5, 5], [10, 500, 10], max_keys=100, max_scores=10**6)

    assert [(plan.first_req, plan.num_keys) for plan in plans] == [(0, 10), (1, 500), (2, 10)]


def test_a_token_is_scored_even_if_its_own_keys_exceed_the_budget() -> None:
    plans = plan_prefill_chunks([2], [100], max_keys=10, max_scores=10)

    assert [plan.num_tokens for plan in plans] == [1, 1]


@pytest.mark.parametrize("tokens_per_state", [1, 4])
@pytest.mark.parametrize(
    ("size", "rank", "interleave"), [(1, 0, 1), (2, 1, 4), (3, 0, 16)], ids=str
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(DSAOptions(), id="one-chunk"),
        pytest.param(DSAOptions(workspace_tokens=128), id="small-workspace"),
        pytest.param(DSAOptions(max_logits_bytes=4000), id="small-logits"),
    ],
)
def test_chunks_see_what_each_token_may_see(
    tokens_per_state: int, size: int, rank: int, interleave: int, options: DSAOptions
) -> None:
    """Whatever the cuts, the tokens of all chunks equal the token-by-token reference."""
    layout = plan_indexer(
        tokens_per_state=tokens_per_state, size=size, rank=rank, interleave=interleave
    )
    draw = random.Random(f"{tokens_per_state}{size}")
    requests = []
    for _ in range(5):
        query_len = draw.randint(2, 60)
        requests.append(prompt(query_len + draw.choice([0, 3, 90]), query_len))

    metadata = build(layout, requests, options)

    addresses = state_addresses(layout, requests, tokens_per_state)
    assert selected_in_chunks(metadata, addresses, layout) == expected_pairs(
        layout, requests, tokens_per_state
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(DSAOptions(workspace_tokens=90), [(0, 2), (2, 1)], id="keys-of-two"),
        pytest.param(DSAOptions(workspace_tokens=89), [(0, 1), (1, 2)], id="a-key-less"),
        pytest.param(DSAOptions(max_logits_bytes=4 * 5400), [(0, 2), (2, 1)], id="scores-of-two"),
        pytest.param(DSAOptions(max_logits_bytes=4 * 5400 - 1), [(0, 1), (1, 2)], id="a-byte-less"),
        pytest.param(DSAOptions(), [(0, 3)], id="default"),
    ],
)
def test_a_chunk_ends_where_a_budget_is_full(
    options: DSAOptions, expected: list[tuple[int, int]]
) -> None:
    """Two prompts have 60 tokens and 90 keys together, in 4 bytes a score."""
    requests = [prompt(50, 20), prompt(40, 40), prompt(10, 10)]

    chunks = build(plan_indexer(), requests, options).prefill

    assert [(chunk.first_req, chunk.num_reqs) for chunk in chunks] == expected


def test_a_workspace_of_less_than_a_state_holds_one() -> None:
    layout = plan_indexer(tokens_per_state=16)
    requests = [prompt(16, 16), prompt(16, 16)]

    chunks = build(layout, requests, DSAOptions(workspace_tokens=1)).prefill

    assert [(chunk.first_req, chunk.num_keys) for chunk in chunks] == [(0, 1), (1, 1)]


def test_room_for_less_than_a_score_is_room_for_one() -> None:
    """Two tokens that see one state have two scores, which is one too many."""
    layout = plan_indexer(tokens_per_state=16)

    chunks = build(layout, [prompt(17, 2)], DSAOptions(max_logits_bytes=1)).prefill

    assert [(chunk.num_keys, chunk.num_tokens) for chunk in chunks] == [(1, 1), (1, 1)]


def test_hundreds_of_prompts_are_planned_one_after_the_other() -> None:
    limits = serving_limits(64, max_num_reqs=300, max_num_batched_tokens=900)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=16), limits)

    (chunk,) = build(layout, [prompt(3, 3)] * 300).prefill

    assert (chunk.num_reqs, chunk.num_tokens, chunk.num_keys) == (300, 900, 900)


@pytest.mark.parametrize(
    "starts", [[0, 0, 0, 0], [0, 5, 9, 12], [0, 60, 60, 60]], ids=["none", "fewer", "all-in-one"]
)
def test_starts_that_differ_on_the_device_stay_within_each_chunk(starts: list[int]) -> None:
    """The host plans the chunks; what a late device says must not index past one."""
    layout = plan_indexer()
    builder_class = DSAIndexerMetadataBuilder.configured(DSAOptions(workspace_tokens=90))
    builder = builder_class(layout, "cpu", block_table_width=layout.width)
    common = make_batch(layout, [prompt(50, 20), prompt(40, 40), prompt(10, 10)])

    metadata = builder.build(
        replace(common, query_start_loc=torch.tensor(starts, dtype=torch.int32))
    )

    for chunk in metadata.prefill:
        requests = chunk.token_to_req
        assert requests.shape == (chunk.num_tokens,)
        assert ((requests >= 0) & (requests < chunk.num_reqs)).all()


def test_rows_lengths_and_tokens_keep_the_order_of_the_batch() -> None:
    """[decode, decode, context]: each part's row i belongs to its request i.

    Reported as https://github.com/NVIDIA/TensorRT-LLM/pull/12657
    and https://github.com/NVIDIA/TensorRT-LLM/pull/18259
    and https://github.com/NVIDIA/TensorRT-LLM/pull/13124
    """
    layout = plan_indexer()
    requests = [Request(30, 1), Request(70, 1), prompt(50, 20), prompt(40, 40)]

    metadata = build(layout, requests)

    common = make_batch(layout, requests)
    (chunk,) = metadata.prefill
    assert torch.equal(metadata.decode.block_table, common.block_table[:2])
    assert metadata.decode.seq_lens.flatten().tolist() == [30, 70]
    assert torch.equal(chunk.block_table, common.block_table[2:])
    assert (chunk.first_req, chunk.first_token, chunk.num_tokens) == (2, 2, 60)
    assert chunk.cu_seq_lens.tolist() == [0, 50, 90]


def test_a_decode_behind_a_prompt_is_scored_as_a_chunk() -> None:
    """[context, decode, decode]: nothing is reordered, and every token sees its own.

    Reported as https://github.com/NVIDIA/TensorRT-LLM/pull/12657
    and https://github.com/NVIDIA/TensorRT-LLM/pull/18259
    and https://github.com/NVIDIA/TensorRT-LLM/pull/13124
    """
    layout = plan_indexer()
    requests = [prompt(50, 20), Request(30, 1), Request(70, 1)]

    metadata = build(layout, requests)

    addresses = state_addresses(layout, requests)
    assert metadata.num_decodes == 0
    assert selected_in_chunks(metadata, addresses, layout) == expected_pairs(layout, requests)


def test_a_length_below_its_bound_moves_no_key() -> None:
    """The host's bound sizes the workspace; the device's lengths say what lies where."""
    layout = plan_indexer()
    exact = [prompt(50, 20), Request(33, 3), Request(70, 2)]
    loose = [prompt(50, 20), replace(exact[1], bound_slack=3), replace(exact[2], bound_slack=2)]

    ours, theirs = build(layout, loose), build(layout, exact)

    assert ours.prefill[0].num_keys == theirs.prefill[0].num_keys + 5
    assert torch.equal(ours.prefill[0].cu_seq_lens, theirs.prefill[0].cu_seq_lens)
    assert torch.equal(ours.prefill[0].cu_seqlen_ke, theirs.prefill[0].cu_seqlen_ke)


def test_every_rank_plans_the_same_chunks() -> None:
    """Ranks gather together: a chunk that one of them cuts elsewhere would hang them."""
    requests = [prompt(length, 7) for length in (9, 33, 50, 61)]
    options = DSAOptions(workspace_tokens=48)
    plans = []
    for rank in range(4):
        layout = plan_indexer(size=4, rank=rank, interleave=16)
        chunks = build(layout, requests, options).prefill
        plans.append([(c.first_req, c.num_reqs, c.num_tokens, c.num_keys) for c in chunks])

    assert plans.count(plans[0]) == 4


def test_padding_rows_behind_prompts_are_no_requests() -> None:
    layout = plan_indexer()
    requests = [Request(30, 1), prompt(50, 20)]
    builder = DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)

    metadata = builder.build(make_batch(layout, requests, num_reqs=5, num_tokens=32))

    (chunk,) = metadata.prefill
    assert (metadata.num_decodes, metadata.num_prefills, chunk.num_reqs) == (1, 1, 1)
    assert chunk.num_tokens == 20


@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_pages_count_states_not_tokens(ratio: int) -> None:
    """A block of 256 tokens at 4 a state is a page of 64 rows; page 3 is 3 x 64 rows in.

    Reported as https://github.com/NVIDIA/TensorRT-LLM/pull/16219
    """
    limits = serving_limits(1024, max_num_batched_tokens=64)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=256, tokens_per_state=ratio), limits)
    builder = DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)

    metadata = builder.build(make_batch(layout, [Request(8, 8, (3,))]))

    assert metadata.states_per_kernel_block == 256 // ratio
    slots = [slot for slot in metadata.slot_mapping.tolist() if slot >= 0]
    assert slots[0] == 3 * metadata.states_per_kernel_block


def test_a_member_of_a_shared_table_names_its_own_states() -> None:
    """Two caches of one group differ in states; the builder never takes the other's.

    Reported as https://github.com/NVIDIA/TensorRT-LLM/pull/16219
    """
    spec = UniformSpec(
        members={
            "mla": AttentionSpec(block_size=64),
            "indexer": AttentionSpec(block_size=64, tokens_per_state=4),
        }
    )
    layout = BlockTableLayout.plan(spec, serving_limits(256))
    chosen = DSAIndexerMetadataBuilder.configured(DSAOptions(member="indexer"))

    metadata = chosen(layout, "cpu", block_table_width=layout.width).build(
        make_batch(layout, [Request(9, 1)])
    )

    assert metadata.tokens_per_state == 4
    with pytest.raises(InvalidSpecError, match="name the member"):
        DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)


def test_ids_and_page_size_come_in_one_unit() -> None:
    """A block of 128 split into 64s: the metadata's page times the width is the capacity.

    Reported as https://github.com/vllm-project/vllm/pull/27753
    and https://github.com/vllm-project/vllm/pull/27547
    """
    limits = serving_limits(1000, max_num_batched_tokens=64)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=128), limits, 64)
    builder = DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)

    metadata = builder.build(make_batch(layout, [Request(900, 1)]))

    assert metadata.kernel_block_size == 64
    capacity = layout.blocks_per_row * layout.block_size
    assert metadata.kernel_block_size * metadata.decode.block_table.shape[1] == capacity


def test_by_default_one_or_two_tokens_are_native_and_the_budgets_are_a_servers() -> None:
    options = DSAOptions()

    assert options.native_query_lens == {1, 2}
    assert (options.workspace_tokens, options.max_logits_bytes) == (65_536, 536_870_912)


@pytest.mark.parametrize("name", ["workspace_tokens", "max_logits_bytes"])
def test_a_budget_that_holds_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidSpecError, match=name):
        DSAOptions(**{name: 0})  # type: ignore[arg-type]  # fields of ints, by name
