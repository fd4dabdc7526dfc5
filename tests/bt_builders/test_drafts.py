"""Draft steps stand where the tables say, move on by a token, and stop at the wall."""

import random
from dataclasses import fields

import pytest
import torch
from tests.support.addressings import rows
from tests.support.batches import Request, make_batch, rows_of
from tests.support.plain_builders import int32, random_decodes
from tests.support.plans import plan, serving_limits

from bt_builders import (
    DSAIndexerMetadataBuilder,
    MLAMetadataBuilder,
    RingTailMetadataBuilder,
    reference,
)
from bt_builders.operations import DraftRows
from bt_width import (
    PAD_SLOT,
    AttentionSpec,
    BlockTableLayout,
    InvalidEditError,
    RingSpec,
    SlidingWindowSpec,
    WidthMismatchError,
)

pytestmark = pytest.mark.fast


def plan_group(
    spec: AttentionSpec | SlidingWindowSpec | RingSpec,
    *,
    kernel_block_size: int | None = None,
    size: int = 1,
    rank: int = 0,
    max_model_len: int = 100,
) -> BlockTableLayout:
    limits = serving_limits(
        max_model_len,
        max_num_reqs=6,
        max_num_batched_tokens=64,
        num_speculative_tokens=3,
        size=size,
        rank=rank,
        interleave=4,
    )
    return BlockTableLayout.plan(spec, limits, kernel_block_size)


@pytest.mark.parametrize("rank", range(2))
def test_at_0_drafts_slots_and_lengths_are_the_tables(rank: int) -> None:
    """Blocks of 32 split into 8s: a drafter that takes one for the other is off by blocks.

    Reported as https://github.com/vllm-project/vllm-ascend/pull/7019
    and https://github.com/InternLM/lmdeploy/pull/4421
    """
    layout = plan_group(AttentionSpec(block_size=32), kernel_block_size=8, size=2, rank=rank)
    builder = MLAMetadataBuilder(layout, "cpu")
    requests = random_decodes(random.Random(rank), layout, [1, 1, 1, 1])
    common = make_batch(layout, requests)

    metadata = builder.start_drafts(common.block_table, common.seq_lens)

    assert torch.equal(metadata.slot_mapping, common.slot_mapping)
    assert torch.equal(metadata.decode.seq_lens, common.local_seq_lens)
    built = builder.build(common)
    assert torch.equal(metadata.decode.token_seq_lens, built.decode.token_seq_lens)
    for field in fields(metadata.decode):
        ours, theirs = getattr(metadata.decode, field.name), getattr(built.decode, field.name)
        if isinstance(ours, torch.Tensor):
            assert torch.equal(ours, theirs), field.name


def test_at_0_drafts_the_indexer_says_what_its_build_says() -> None:
    """Reported as https://github.com/vllm-project/vllm-ascend/pull/7019
    and https://github.com/InternLM/lmdeploy/pull/4421
    """
    layout = plan_group(AttentionSpec(block_size=32, tokens_per_state=4), kernel_block_size=8)
    builder = DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)
    common = make_batch(layout, random_decodes(random.Random(1), layout, [1, 1, 1]))
    built = builder.build(common)

    metadata = builder.start_drafts(common.block_table, common.seq_lens)

    assert torch.equal(metadata.slot_mapping, built.slot_mapping)
    assert torch.equal(metadata.decode.seq_lens, built.decode.seq_lens)
    assert torch.equal(metadata.decode.global_seq_lens, built.decode.global_seq_lens)
    assert metadata.decode.form == built.decode.form == "plain"


@pytest.mark.parametrize("tokens_per_state", [1, 4])
@pytest.mark.parametrize("rank", range(2))
def test_every_step_equals_the_contract(tokens_per_state: int, rank: int) -> None:
    """Token by token: the next position's slot and what it sees, on this rank."""
    spec = AttentionSpec(block_size=16, tokens_per_state=tokens_per_state)
    layout = plan_group(spec, kernel_block_size=8, size=2, rank=rank)
    builder = DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)
    draw = random.Random(rank)
    blocks = [tuple(draw.sample(range(1, 99), layout.max_num_blocks)) for _ in range(3)]
    lens = [17, 40, 1]
    requests = [Request(n, 1, ids) for n, ids in zip(lens, blocks, strict=True)]
    common = make_batch(layout, requests)
    rows = rows_of(layout, requests)

    metadata = builder.start_drafts(common.block_table, int32(lens))
    for step in range(20):
        for index, row in enumerate(rows):
            position = lens[index] + step - 1
            slot = layout.slot(position, row)
            if slot != PAD_SLOT and (position + 1) % tokens_per_state:
                slot = PAD_SLOT
            assert metadata.slot_mapping[index] == (
                slot if slot == PAD_SLOT else slot // tokens_per_state
            )
            seen = layout.local_length(position + 1) // tokens_per_state
            assert metadata.decode.seq_lens[index].tolist() == [seen]
        metadata = builder.advance_drafts(common.block_table)


def test_past_the_longest_request_the_length_stays_and_no_slot_is_written() -> None:
    """Columns of the alignment exist past the wall; a draft there still has no slot."""
    layout = plan_group(AttentionSpec(block_size=16), max_model_len=98)
    builder = MLAMetadataBuilder(layout, "cpu")
    common = make_batch(layout, [Request(97, 1), Request(50, 1)])
    builder.start_drafts(common.block_table, common.seq_lens)

    seen = []
    for _ in range(4):
        metadata = builder.advance_drafts(common.block_table)
        seen.append((int(metadata.slot_mapping[0]), int(metadata.decode.seq_lens[0])))

    # position 97 lies at offset 1 of the request's seventh block
    assert seen == [(7 * 16 + 1, 98), (PAD_SLOT, 98), (PAD_SLOT, 98), (PAD_SLOT, 98)]


@pytest.mark.parametrize("length", [33, 40, 2**31 - 1])
def test_a_position_past_the_row_reads_no_neighbour(length: int) -> None:
    """A row of two columns, and a length that is wrong: no slot, never the next row's.

    Reported as https://github.com/vllm-project/vllm/issues/53982
    and https://github.com/vllm-project/vllm/pull/54296
    """
    addressing, ratio = rows(2, 16, 1, 1, 0, 1, 2**31 - 1)
    drafts = DraftRows(
        int32([length - 1, 16]), int32([0, 0]), torch.zeros(2).long(), torch.zeros(2).long()
    )
    table = int32([5, 6, 9, 10]).view(2, 2)

    reference.step_drafts(addressing, ratio, table, drafts, 1)

    assert drafts.slot_mapping.tolist() == [PAD_SLOT, 10 * 16]


def test_padding_rows_stay_empty() -> None:
    """A dummy draft step names no real slot, however often it moves on.

    Reported as https://github.com/vllm-project/vllm/pull/56734
    """
    layout = plan_group(AttentionSpec(block_size=16))
    builder = MLAMetadataBuilder(layout, "cpu")
    common = make_batch(layout, [Request(20, 1)], num_reqs=3, num_tokens=3)
    builder.start_drafts(common.block_table, common.seq_lens)

    for _ in range(3):
        metadata = builder.advance_drafts(common.block_table)

        assert metadata.slot_mapping.tolist()[1:] == [PAD_SLOT, PAD_SLOT]
        assert metadata.decode.seq_lens.tolist()[1:] == [0, 0]


def test_a_null_column_gives_no_slot() -> None:
    """A drafter that runs past its request's blocks never writes to the null block."""
    layout = plan_group(AttentionSpec(block_size=16))
    builder = MLAMetadataBuilder(layout, "cpu")
    common = make_batch(layout, [Request(16, 1)])
    builder.start_drafts(common.block_table, common.seq_lens)

    assert builder.advance_drafts(common.block_table).slot_mapping.tolist() == [PAD_SLOT]


def test_one_token_a_request_is_not_the_targets_layout() -> None:
    """A verify step's four tokens a request say nothing about the draft's rows [0, 1, 2].

    Reported as https://github.com/NVIDIA/TensorRT-LLM/pull/16925
    """
    layout = plan_group(AttentionSpec(block_size=16))
    builder = MLAMetadataBuilder(layout, "cpu")
    common = make_batch(layout, [Request(20, 4), Request(30, 4), Request(40, 4)])
    builder.build(common)

    decode = builder.start_drafts(common.block_table, int32([18, 27, 40])).decode

    assert decode.query_start_loc.tolist() == [0, 1, 2, 3]
    assert decode.seq_lens.tolist() == [18, 27, 40]


def test_a_full_batch_of_drafts_has_all_of_its_starts() -> None:
    layout = plan_group(AttentionSpec(block_size=16))
    builder = MLAMetadataBuilder(layout, "cpu")
    common = make_batch(layout, [Request(20, 1)] * layout.limits.max_num_reqs)

    decode = builder.start_drafts(common.block_table, common.seq_lens).decode

    assert decode.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("rank", range(8))
def test_a_replicated_group_has_every_slot_on_every_rank(rank: int) -> None:
    """A sharded group has each of them on exactly one rank.

    Reported as https://github.com/vllm-project/vllm-ascend/issues/14320
    and https://github.com/vllm-project/vllm-ascend/pull/14402
    and https://github.com/vllm-project/vllm-ascend/pull/16327
    """
    lens = int32([20, 33, 47])
    slots = {}
    specs: dict[str, AttentionSpec | SlidingWindowSpec] = {
        "replicated": SlidingWindowSpec(block_size=16, window=64),
        "sharded": AttentionSpec(block_size=16),
    }
    for name, spec in specs.items():
        layout = plan_group(spec, size=8, rank=rank)
        builder = MLAMetadataBuilder(layout, "cpu")
        requests = [Request(int(n), 1) for n in lens]
        common = make_batch(layout, requests)
        slots[name] = builder.start_drafts(common.block_table, lens).slot_mapping.tolist()

    assert slots["replicated"] == [2 * 16 + 3, 5 * 16 + 0, 8 * 16 + 14]
    owners = [(int(n) - 1) // 4 % 8 for n in lens]
    assert [slot >= 0 for slot in slots["sharded"]] == [owner == rank for owner in owners]


def test_field_3_8_an_advance_reads_the_table_of_its_own_step() -> None:
    """A replay that kept the table of capture time drafted from null blocks."""
    layout = plan_group(AttentionSpec(block_size=32), kernel_block_size=8)
    builder = MLAMetadataBuilder(layout, "cpu")
    table = torch.zeros(6, layout.width, dtype=torch.int32)
    lens = torch.zeros(6, dtype=torch.int32)
    captured = builder.start_drafts(table[:2], lens[:2])

    later = make_batch(layout, [Request(40, 1), Request(50, 1)])
    table[:2].copy_(later.block_table)
    lens[:2].copy_(later.seq_lens)
    builder.start_drafts(table[:2], lens[:2])

    assert torch.equal(captured.slot_mapping, later.slot_mapping)
    assert torch.equal(captured.decode.seq_lens, later.seq_lens)


def test_the_tables_and_the_batch_are_only_read() -> None:
    layout = plan_group(AttentionSpec(block_size=16))
    common = make_batch(layout, [Request(20, 1), Request(30, 1)])
    kept = {
        field.name: value.clone()
        for field in fields(common)
        if isinstance(value := getattr(common, field.name), torch.Tensor)
    }
    builder = DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)

    builder.build(common)
    builder.start_drafts(common.block_table, common.seq_lens)
    builder.advance_drafts(common.block_table)

    for name, value in kept.items():
        assert torch.equal(getattr(common, name), value), name


@pytest.mark.parametrize("kind", ["mla", "dsa", "ring"])
def test_what_does_not_fit_is_refused(kind: str) -> None:
    builder: MLAMetadataBuilder | DSAIndexerMetadataBuilder | RingTailMetadataBuilder
    if kind == "ring":
        layout = plan_group(RingSpec(block_size=4))
        builder = RingTailMetadataBuilder(layout, "cpu")
    else:
        layout = plan_group(AttentionSpec(block_size=16))
        builder = (
            MLAMetadataBuilder(layout, "cpu")
            if kind == "mla"
            else DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)
        )
    table = torch.zeros(2, layout.width, dtype=torch.int32)

    with pytest.raises(WidthMismatchError, match="block_table"):
        builder.start_drafts(table.repeat(1, 2), int32([3, 4]))
    with pytest.raises(WidthMismatchError, match="seq_lens"):
        builder.start_drafts(table, torch.tensor([3, 4]))
    with pytest.raises(WidthMismatchError, match="block_table"):
        builder.advance_drafts(table.long())
    with pytest.raises(InvalidEditError, match="7 requests"):
        builder.advance_drafts(table[:1].repeat(7, 1))


def test_drafts_go_as_far_as_the_lookahead_that_tables_map() -> None:
    """Positions 63, 64 and 65 of requests of 64 tokens: what the tables say of them."""
    limits = serving_limits(
        64, max_num_reqs=2, max_num_batched_tokens=8, num_speculative_tokens=3, lookahead_tokens=4
    )
    layout = BlockTableLayout.plan(AttentionSpec(block_size=16, token_alignment=None), limits)
    builder = MLAMetadataBuilder(layout, "cpu")
    row = int32([3, 4, 5, 6, 7]).view(1, 5)
    steps = [builder.start_drafts(row, int32([64]))]
    found = []
    for _ in range(2):
        found.append((steps[-1].positions.tolist(), steps[-1].slot_mapping.tolist()))
        steps.append(builder.advance_drafts(row))
    found.append((steps[-1].positions.tolist(), steps[-1].slot_mapping.tolist()))

    assert found == [([63], [111]), ([64], [112]), ([65], [113])]
    assert found[2][1] == [layout.slot(65, [3, 4, 5, 6, 7])]
    assert builder.start_drafts(row, int32([66])).decode.seq_lens.tolist() == [66]


def test_drafts_of_a_rank_say_global_positions() -> None:
    """The token lies on the other rank: no slot here, and its position all the same."""
    layout = plan(AttentionSpec(block_size=16), 64, size=2)
    builder = DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)
    table = int32(range(1, layout.width + 1)).view(1, -1)

    metadata = builder.start_drafts(table, int32([10]))

    assert metadata.positions.tolist() == [9]
    assert metadata.decode.global_seq_lens.tolist() == [[10]]
    assert metadata.slot_mapping.tolist() == [layout.slot(9, table[0].tolist())]
