"""Mamba's states: where each step reads and writes them, in both modes, with drafts."""

import random
from dataclasses import replace
from typing import Literal

import pytest
import torch
from tests.support.batches import Request, make_batch, rows_of
from tests.support.plain_builders import int32
from tests.support.plans import serving_limits

from bt_builders import MambaMetadataBuilder, MambaOptions, MambaStates
from bt_width import (
    NULL_BLOCK,
    AttentionSpec,
    BlockTableLayout,
    InvalidEditError,
    InvalidSpecError,
    MambaSpec,
    RowOverflowError,
    UniformSpec,
    WidthMismatchError,
)

pytestmark = pytest.mark.fast


def plan_mamba(
    *,
    mode: Literal["none", "align"] = "align",
    block_size: int = 16,
    num_drafts: int = 0,
    max_model_len: int = 400,
    size: int = 1,
) -> BlockTableLayout:
    limits = serving_limits(
        max_model_len,
        max_num_reqs=8,
        max_num_batched_tokens=128,
        num_speculative_tokens=num_drafts,
        size=size,
    )
    spec = MambaSpec(block_size=block_size, mode=mode, num_speculative_blocks=num_drafts)
    return BlockTableLayout.plan(spec, limits)


def build_states(layout: BlockTableLayout, requests: list[Request]) -> MambaStates:
    return MambaMetadataBuilder(layout, "cpu").build(make_batch(layout, requests)).states


@pytest.mark.parametrize(
    ("computed", "column"),
    [(1, 0), (640, 0), (641, 1), (1280, 1), (1281, 2), (3360, 5)],
    ids=str,
)
def test_the_column_read_follows_the_groups_own_block(computed: int, column: int) -> None:
    """3,360 computed tokens and blocks of 640: column 5, not 20 of some other group's 160.

    Reported as https://github.com/vllm-project/vllm/pull/53398
    and https://github.com/vllm-project/vllm/issues/55600
    and https://github.com/vllm-project/vllm/issues/53142
    and https://github.com/wtdcode/vllm-backport/pull/77
    """
    layout = plan_mamba(block_size=640, max_model_len=5000)

    states = build_states(layout, [Request(computed + 1, 1)])

    assert states.source_ids.tolist() == [1 + column]


@pytest.mark.parametrize(
    ("computed", "block_size", "column"),
    [(100_096, 2176, 45), (11_520, 1152, 9), (7169, 7168, 1)],
    ids=str,
)
def test_columns_of_the_reports(computed: int, block_size: int, column: int) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/53398
    and https://github.com/vllm-project/vllm/issues/55600
    and https://github.com/vllm-project/vllm/issues/53142
    and https://github.com/wtdcode/vllm-backport/pull/77
    """
    layout = plan_mamba(block_size=block_size, max_model_len=262_144)

    states = build_states(layout, [Request(computed + 1, 1)])

    assert states.source_ids.tolist() == [1 + column]


def test_a_column_past_the_width_raises_on_the_host() -> None:
    """The longest request that fits writes its last column; one more token is refused.

    Reported as https://github.com/vllm-project/vllm/pull/53398
    and https://github.com/vllm-project/vllm/issues/55600
    and https://github.com/vllm-project/vllm/issues/53142
    and https://github.com/wtdcode/vllm-backport/pull/77
    """
    layout = plan_mamba(block_size=16, max_model_len=64, num_drafts=1)
    builder = MambaMetadataBuilder(layout, "cpu")
    common = make_batch(layout, [Request(64, 1)])
    too_long = replace(common, seq_lens_upper_bound_host=int32([65]), max_seq_len=65)

    assert builder.build(common).states.state_ids.tolist() == [[4, 5]]
    with pytest.raises(RowOverflowError, match=r"max_seq_len must be an int in 0\.\.64"):
        builder.build(too_long)


def test_a_length_past_the_row_stays_in_its_last_column() -> None:
    """Where only the device knows the length, the next request's row is never read."""
    layout = plan_mamba(block_size=16, max_model_len=64)
    common = make_batch(layout, [Request(60, 1), Request(60, 1)])
    common.seq_lens[0] = common.num_computed_tokens[0] = 70

    states = MambaMetadataBuilder(layout, "cpu").build(common).states

    assert states.source_ids.tolist()[0] == common.block_table[0, -1]
    assert states.state_ids.tolist()[0] == common.block_table[0, -1:].tolist()


def test_a_replicated_state_is_not_divided_by_the_ranks() -> None:
    """257 tokens at 16 a block need 17 columns on each of two ranks.

    Reported as https://github.com/vllm-project/vllm/pull/50287
    """
    layout = plan_mamba(max_model_len=512, size=2)

    states = build_states(layout, [Request(257, 1), Request(5, 1)])

    assert layout.width == 32
    assert states.state_ids.tolist() == [[17], [18]]


def test_mode_none_keeps_its_states_in_the_first_columns() -> None:
    """Two of three tokens stayed: the state to start from is the second one's."""
    layout = plan_mamba(mode="none", num_drafts=2)

    states = build_states(layout, [Request(40, 3, num_accepted=2), Request(90, 1, num_accepted=3)])

    assert states.state_ids.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert states.source_ids.tolist() == [2, 6]
    assert states.num_accepted_tokens.tolist() == [2, 3]
    assert states.copies.tolist() == [False, False]


def test_align_copies_where_the_step_writes_another_column() -> None:
    """16 computed tokens: the state lies in column 0, the 17th token's goes to column 1."""
    layout = plan_mamba()

    states = build_states(layout, [Request(17, 1), Request(18, 1)])

    assert states.source_ids.tolist() == [1, 4]
    assert states.state_ids.tolist() == [[2], [4]]
    assert states.copies.tolist() == [True, False]


def test_a_new_request_has_no_state_to_start_from() -> None:
    layout = plan_mamba()

    states = build_states(layout, [Request(20, 20, is_prefilling=True)])

    assert states.has_initial_states.tolist() == [False]
    assert states.source_ids.tolist() == [NULL_BLOCK]
    assert states.state_ids.tolist() == [[2]]


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("seed", range(4))
def test_states_equal_the_plain_reference(mode: Literal["none", "align"], seed: int) -> None:
    """Columns from ``layout.state_column``, one request after the other."""
    draw = random.Random(seed)
    num_drafts = draw.randint(0, 3)
    layout = plan_mamba(mode=mode, block_size=draw.choice([1, 4, 16]), num_drafts=num_drafts)
    requests = []
    for _ in range(6):
        query_len = draw.randint(1, num_drafts + 1)
        computed = draw.randint(1, 200)
        accepted = draw.randint(1, num_drafts + 1)
        requests.append(Request(computed + query_len, query_len, num_accepted=accepted))

    states = build_states(layout, requests)

    for index, (request, row) in enumerate(zip(requests, rows_of(layout, requests), strict=True)):
        read = layout.state_column(request.num_computed)
        write = layout.state_column(request.seq_len)
        assert states.source_ids[index] == row[read + request.num_accepted - 1]
        assert states.state_ids[index].tolist() == row[write : write + 1 + num_drafts]
        assert states.copies[index] == (read != write)
        assert states.num_accepted_tokens[index] == (request.num_accepted if read == write else 1)


def test_padding_rows_hold_the_null_state_or_minus_1() -> None:
    """The table pads with 0; -1 is a translation for kernels that want it, in states only.

    Reported as https://github.com/vllm-project/vllm/pull/35431
    and https://github.com/vllm-project/vllm/pull/39064
    and https://github.com/vllm-project/vllm/pull/33937
    and https://github.com/vllm-project/vllm-gaudi/pull/951
    and https://github.com/ovg-project/kvcached/pull/398
    """
    layout = plan_mamba(num_drafts=1)
    common = make_batch(layout, [Request(17, 1)], num_reqs=3, num_tokens=3)
    for pad in (NULL_BLOCK, -1):
        builder = MambaMetadataBuilder.configured(MambaOptions(state_pad=pad))(layout, "cpu")

        states = builder.build(common).states

        assert states.source_ids.tolist() == [1, pad, pad]
        assert states.state_ids.tolist() == [[2, 3], [pad, pad], [pad, pad]]
        assert states.num_accepted_tokens.tolist() == [1, 1, 1]
        assert (common.block_table[1:] == NULL_BLOCK).all()


def test_a_dummy_batch_of_cleared_rows_has_the_null_state() -> None:
    """A finished request's id must not be the state of a rank without work.

    Reported as https://github.com/vllm-project/vllm/pull/37728
    """
    layout = plan_mamba()
    builder = MambaMetadataBuilder(layout, "cpu")
    builder.build(make_batch(layout, [Request(9, 1, (7,))]))

    dummy = make_batch(layout, [], num_reqs=4, num_tokens=4, max_query_len=1)
    decode = builder.build(dummy).decode

    assert decode.num_reqs == 4
    assert decode.states.state_ids.flatten().tolist() == [0, 0, 0, 0]
    assert decode.states.source_ids.tolist() == [0, 0, 0, 0]


def test_a_pad_that_names_a_state_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="some request's state"):
        MambaOptions(state_pad=7)


def test_a_chunk_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="chunk_size"):
        MambaOptions(chunk_size=0)


def test_field_3_9_too_few_speculative_states_are_refused() -> None:
    """An engine broadcast one state over all columns, and drafts overwrote each other."""
    limits = serving_limits(64, num_speculative_tokens=2)
    layout = BlockTableLayout.plan(MambaSpec(block_size=16, num_speculative_blocks=1), limits)

    with pytest.raises(InvalidSpecError, match="num_speculative_blocks=2"):
        MambaMetadataBuilder(layout, "cpu")


def test_field_3_9_state_columns_never_repeat() -> None:
    layout = plan_mamba(mode="none", num_drafts=3)

    states = build_states(layout, [Request(20, 4), Request(30, 1)])

    for row in states.state_ids.tolist():
        assert len(set(row)) == 4


def test_a_group_of_another_kind_is_refused() -> None:
    layout = BlockTableLayout.plan(AttentionSpec(block_size=16), serving_limits(64))

    with pytest.raises(InvalidSpecError, match="recurrent states"):
        MambaMetadataBuilder(layout, "cpu")


def test_layers_that_share_a_table_share_its_states() -> None:
    spec = UniformSpec(members={name: MambaSpec(block_size=16, mode="align") for name in "ab"})
    layout = BlockTableLayout.plan(spec, serving_limits(64))

    assert build_states(layout, [Request(17, 1)]).state_ids.tolist() == [[2]]


def test_prompts_prefill_and_one_token_with_a_state_decodes() -> None:
    """A short prompt writes one state only, so that it is no decode, unless it is one token."""
    layout = plan_mamba(num_drafts=3)
    requests = [
        Request(40, 4),
        Request(30, 1, is_prefilling=True),
        Request(20, 3, is_prefilling=True),
        Request(1, 1, is_prefilling=True),
    ]

    metadata = MambaMetadataBuilder(layout, "cpu").build(make_batch(layout, requests))

    assert metadata.decode.num_reqs == 2
    assert metadata.decode.query_start_loc.tolist() == [0, 4, 5]
    assert metadata.prefill.num_reqs == 2
    assert metadata.prefill.query_start_loc.tolist() == [0, 3, 4]
    assert metadata.prefill.states.has_initial_states.tolist() == [True, False]
    assert metadata.prefill.chunks.seq_idx.tolist() == [0, 1]


@pytest.mark.parametrize("num_prefills", range(4))
@pytest.mark.parametrize("num_decodes", range(4))
def test_both_parts_are_slices_of_the_batch(num_decodes: int, num_prefills: int) -> None:
    layout = plan_mamba()
    decodes = [Request(40 + row, 1) for row in range(num_decodes)]
    prompts = [Request(30, 7 + row, is_prefilling=True) for row in range(num_prefills)]

    metadata = MambaMetadataBuilder(layout, "cpu").build(make_batch(layout, decodes + prompts))

    decode, prefill = metadata.decode, metadata.prefill
    assert (decode.num_reqs, decode.num_tokens) == (num_decodes, num_decodes)
    assert decode.max_query_len == min(num_decodes, 1)
    assert decode.query_start_loc.tolist() == list(range(num_decodes + 1))
    assert decode.states.source_ids.tolist() == metadata.states.source_ids[:num_decodes].tolist()
    assert (prefill.first_req, prefill.num_reqs) == (num_decodes, num_prefills)
    assert (prefill.first_token, prefill.num_tokens) == (num_decodes, [0, 7, 15, 24][num_prefills])
    assert prefill.query_start_loc.tolist() == [0, 7, 15, 24][: num_prefills + 1]
    assert prefill.states.source_ids.tolist() == metadata.states.source_ids[num_decodes:].tolist()


def test_a_prompt_of_one_token_prefills() -> None:
    """It has no state: a decode would start from whatever its block held before."""
    layout = plan_mamba()

    metadata = MambaMetadataBuilder(layout, "cpu").build(
        make_batch(layout, [Request(1, 1, is_prefilling=True)])
    )

    assert (metadata.decode.num_reqs, metadata.prefill.num_reqs) == (0, 1)


def test_drafts_behind_a_prompt_are_refused() -> None:
    """The prefilling scan keeps one state: a rejected draft could not be taken back."""
    layout = plan_mamba(num_drafts=1)
    requests = [Request(20, 20, is_prefilling=True), Request(30, 2)]

    with pytest.raises(InvalidEditError, match="put all decodes before"):
        MambaMetadataBuilder(layout, "cpu").build(make_batch(layout, requests))


def test_one_token_behind_a_prompt_goes_with_the_prompts() -> None:
    """It has no draft to take back: the scan starts from its state and keeps the one after."""
    layout = plan_mamba(num_drafts=1)
    requests = [Request(20, 20, is_prefilling=True), Request(30, 1, num_accepted=2)]

    prefill = MambaMetadataBuilder(layout, "cpu").build(make_batch(layout, requests)).prefill

    assert prefill.num_reqs == 2
    assert prefill.states.has_initial_states.tolist() == [False, True]
    # the first request's three blocks, then the second one's: its column 1, one draft on
    assert prefill.states.source_ids.tolist() == [NULL_BLOCK, 3 + 3]


def test_chunks_follow_the_tokens_that_prefill() -> None:
    layout = plan_mamba()
    requests = [
        Request(40, 1),
        Request(30, 12, is_prefilling=True),
        Request(9, 9, is_prefilling=True),
    ]
    builder = MambaMetadataBuilder.configured(MambaOptions(chunk_size=8))(layout, "cpu")

    chunks = builder.build(make_batch(layout, requests)).prefill.chunks

    assert chunks.cu_chunk_seqlens.tolist() == [0, 6, 12, 20, 21]
    assert chunks.seq_idx.tolist() == [0, 0, 1, 1]
    assert chunks.last_chunk_indices.tolist() == [1, 3]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("seed", range(3))
def test_accepted_drafts_are_found_by_the_next_step(
    mode: Literal["none", "align"], block_size: int, seed: int
) -> None:
    """A recurrence that only counts tokens runs 60 steps through the builder's ids.

    Each step starts from a source, writes one state a token, keeps some of them, and
    copies what ``commit_states`` says. The next source holds exactly the tokens that stayed,
    and so does every boundary state that align keeps.
    """
    draw = random.Random(seed)
    num_drafts = 3
    layout = plan_mamba(mode=mode, block_size=block_size, num_drafts=num_drafts)
    builder = MambaMetadataBuilder(layout, "cpu")
    cache: dict[int, int] = {}
    blocks = tuple(draw.sample(range(1, 1000), layout.max_num_blocks))
    length, accepted = 5, 1
    cache[blocks[layout.state_column(length)]] = length
    for _ in range(60):
        query_len = draw.randint(1, num_drafts + 1)
        request = Request(length + query_len, query_len, blocks, num_accepted=accepted)
        common = make_batch(layout, [request])

        states = builder.build(common).states

        assert cache[int(states.source_ids[0])] == length
        for token in range(query_len):
            cache[int(states.state_ids[0, token])] = length + token + 1
        stays = draw.randint(1, query_len)
        committed = builder.commit_states(common, int32([stays]))
        copied = zip(*(ids[0].tolist() for ids in committed[:2]), strict=True)
        # all sources are read before the first target is written
        cache.update({target: cache[source] for source, target in copied if source})
        for boundary in range(length + 1, length + stays + 1):
            if mode == "align" and boundary % block_size == 0:
                assert cache[blocks[layout.state_column(boundary)]] == boundary
        length += stays
        accepted = int(committed.num_accepted_tokens[0])
        if length > 300:
            length = 5
            accepted = 1
            cache[blocks[layout.state_column(length)]] = length


def test_a_step_in_place_finds_its_state_after_the_copy() -> None:
    """Kernels that work in place: copy where told, then read ``num_accepted_tokens - 1``."""
    layout = plan_mamba(num_drafts=2)
    requests = [Request(18, 2, num_accepted=2), Request(17, 3, num_accepted=3)]
    states = build_states(layout, requests)

    source = states.source_ids.clone()
    ids = states.state_ids.clone()
    ids[states.copies, 0] = source[states.copies]

    picked = ids.gather(1, (states.num_accepted_tokens - 1).long().unsqueeze(1)).flatten()
    assert torch.equal(picked, source)


def test_prefills_have_nothing_to_commit() -> None:
    layout = plan_mamba(num_drafts=2)
    requests = [Request(17, 3), Request(40, 33, is_prefilling=True)]
    builder = MambaMetadataBuilder(layout, "cpu")
    common = make_batch(layout, requests)
    builder.build(common)

    committed = builder.commit_states(common, int32([2, 33]))

    assert committed.source_ids.tolist() == [[2 + 1], [NULL_BLOCK]]
    assert committed.target_ids.tolist() == [[1], [NULL_BLOCK]]
    assert committed.num_accepted_tokens.tolist() == [1, 1]


def test_accepted_counts_of_another_shape_are_refused() -> None:
    layout = plan_mamba(num_drafts=2)
    common = make_batch(layout, [Request(17, 3)])

    with pytest.raises(WidthMismatchError, match="num_accepted_tokens"):
        MambaMetadataBuilder(layout, "cpu").commit_states(common, int32([2, 2]))


def test_a_capture_batch_of_single_tokens_decodes() -> None:
    """Length 1, one token, not prefilling: what an engine captures is a decode."""
    layout = plan_mamba()

    metadata = MambaMetadataBuilder(layout, "cpu").build(make_batch(layout, [Request(1, 1)] * 4))

    assert (metadata.decode.num_reqs, metadata.prefill.num_reqs) == (4, 0)
    assert metadata.states.has_initial_states.tolist() == [False] * 4


def test_padding_of_decodes_has_no_slot_and_no_state() -> None:
    """Two decodes of four tokens, padded to 69: more than all requests' drafts."""
    limits = serving_limits(
        256, max_num_reqs=16, max_num_batched_tokens=128, num_speculative_tokens=3
    )
    spec = MambaSpec(block_size=16, mode="align", num_speculative_blocks=3)
    layout = BlockTableLayout.plan(spec, limits)
    common = make_batch(layout, [Request(40, 4), Request(20, 4)], num_reqs=5, num_tokens=69)

    metadata = MambaMetadataBuilder(layout, "cpu").build(common)

    assert metadata.prefill.num_reqs == 0
    assert metadata.states.source_ids[2:].tolist() == [NULL_BLOCK] * 3
    assert metadata.states.state_ids[2:].flatten().tolist() == [NULL_BLOCK] * 12
    assert common.slot_mapping[8:].tolist() == [-1] * 61
