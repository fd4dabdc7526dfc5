"""Mamba align: every state that a row promises is right after every step.

A row promises the state after each whole number of blocks, since whoever shares that
prefix starts from it, and the state after the tokens that stayed.
"""

import itertools
import random

import pytest
import torch
from tests.support.batches import Request, make_batch
from tests.support.plain_builders import int32
from tests.support.plans import serving_limits

from bt_builders import CommittedStates, MambaMetadataBuilder, kernels, reference
from bt_builders.operations import Operations
from bt_width import BlockTableLayout, ContextParallel, MambaSpec, ServingLimits

pytestmark = pytest.mark.fast

BOTH = pytest.mark.parametrize("operations", [reference, kernels], ids=["reference", "kernel"])


def plan_states(block_size: int, num_drafts: int, max_model_len: int = 96) -> BlockTableLayout:
    limits = serving_limits(
        max_model_len,
        max_num_reqs=4,
        max_num_batched_tokens=256,
        num_speculative_tokens=num_drafts,
        lookahead_tokens=num_drafts,
    )
    spec = MambaSpec(block_size=block_size, mode="align", num_speculative_blocks=num_drafts)
    return BlockTableLayout.plan(spec, limits)


def builder_with(layout: BlockTableLayout, operations: Operations) -> MambaMetadataBuilder:
    builder = MambaMetadataBuilder(layout, "cpu")
    builder._operations = operations
    return builder


def copies(committed: CommittedStates, row: int = 0) -> list[tuple[int, int]]:
    pairs = zip(committed.source_ids[row].tolist(), committed.target_ids[row].tolist(), strict=True)
    return [pair for pair in pairs if any(pair)]


@BOTH
@pytest.mark.parametrize(
    ("accepted", "expected", "next_accepted"), [(2, [(13, 12)], 1), (1, [], 1)], ids=["two", "one"]
)
def test_a_state_at_a_blocks_end_is_kept_there(
    operations: Operations, accepted: int, expected: list[tuple[int, int]], next_accepted: int
) -> None:
    """30 tokens computed, 2 scheduled: column 1 promises the state of 32 tokens."""
    layout = plan_states(16, 1)
    common = make_batch(layout, [Request(32, 2, block_ids=(11, 12, 13))])

    committed = builder_with(layout, operations).commit_states(common, int32([accepted]))

    assert copies(committed) == expected
    assert committed.num_accepted_tokens.tolist() == [next_accepted]


@BOTH
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_the_first_block_holds_its_state_however_many_drafts_stay(
    operations: Operations, accepted: int
) -> None:
    """3 computed and 4 scheduled, 4 a block: the state of 4 tokens goes to column 0."""
    layout = plan_states(4, 3)
    common = make_batch(layout, [Request(7, 4, block_ids=(11, 12, 13, 14, 15))])

    committed = builder_with(layout, operations).commit_states(common, int32([accepted]))

    assert copies(committed) == [(12, 11)]
    assert committed.num_accepted_tokens.tolist() == [accepted]


@BOTH
def test_a_request_without_tokens_keeps_its_state_where_it_was(operations: Operations) -> None:
    layout = plan_states(16, 3)
    idle = Request(32, 0, block_ids=(11, 12, 13, 14, 15), num_accepted=3)
    common = make_batch(layout, [idle, Request(20, 1)])

    committed = builder_with(layout, operations).commit_states(common, int32([0, 1]))

    assert copies(committed) == []
    assert committed.num_accepted_tokens.tolist() == [3, 1]


# an interpreted kernel takes a thousand times as long
@pytest.mark.parametrize(
    ("block_size", "num_drafts", "operations"),
    [
        *itertools.product([1, 2, 3, 4, 16], [0, 1, 3, 5], [reference]),
        *itertools.product([1, 4], [0, 3], [kernels]),
    ],
    ids=lambda value: value.__name__.rpartition(".")[2] if hasattr(value, "__name__") else value,
)
def test_every_promised_state_is_right_after_every_step(
    block_size: int, num_drafts: int, operations: Operations
) -> None:
    """A scan that counts tokens: prompts in chunks, then drafts accepted, some, or none.

    With blocks of fewer tokens than a step has, one step passes several boundaries.
    """
    layout = plan_states(block_size, num_drafts)
    builder = builder_with(layout, operations)
    draw = random.Random(block_size * 10 + num_drafts)
    for _ in range(4 if operations is reference else 1):
        _run_a_request(layout, builder, draw, num_drafts)


def _run_a_request(
    layout: BlockTableLayout, builder: MambaMetadataBuilder, draw: random.Random, num_drafts: int
) -> None:
    ids = tuple(draw.sample(range(1, 500), layout.max_num_blocks))
    states: dict[int, int] = {}
    promised: list[int] = []
    computed, accepted, prompt = 0, 1, draw.randint(1, 40)
    while computed < 90:
        is_prefilling = computed < prompt
        if is_prefilling:
            most = min(prompt, computed + draw.randint(1, 20))
            query_len = layout.chunk_end(computed, most - computed) - computed
        else:
            query_len = draw.randint(1, 1 + num_drafts)
        request = Request(computed + query_len, query_len, ids, is_prefilling, accepted)
        common = make_batch(layout, [request])
        found = builder.build(common).states
        if computed:
            assert states[int(found.source_ids[0])] == computed
        if is_prefilling:
            states[int(found.state_ids[0, 0])] = request.seq_len
            stays = query_len
        else:
            for token, state_id in enumerate(found.state_ids[0].tolist()[:query_len]):
                states[state_id] = computed + token + 1
            stays = draw.choice([1, query_len, draw.randint(1, query_len)])
        committed = builder.commit_states(common, int32([stays]))
        read = {target: states[source] for source, target in copies(committed)}
        states.update(read)
        # a chunk leaves one state, a decode one for every token
        reached = range(computed + (stays if is_prefilling else 1), computed + stays + 1)
        promised += [tokens for tokens in reached if tokens % layout.block_size == 0]
        computed, accepted = computed + stays, int(committed.num_accepted_tokens[0])
        for tokens in promised:
            assert states[ids[layout.state_column(tokens)]] == tokens


def test_every_table_is_the_same_on_all_ranks() -> None:
    """States are replicated: the ids of a rank are those of every other."""
    found = []
    for rank in range(2):
        limits = ServingLimits(
            max_model_len=64,
            max_num_reqs=2,
            max_num_batched_tokens=8,
            num_speculative_tokens=1,
            context_parallel=ContextParallel(size=2, rank=rank),
        )
        spec = MambaSpec(block_size=4, mode="align", num_speculative_blocks=1)
        layout = BlockTableLayout.plan(spec, limits)
        states = MambaMetadataBuilder(layout, "cpu").build(make_batch(layout, [Request(9, 2)]))
        found.append(torch.cat([states.states.source_ids, states.states.state_ids.flatten()]))

    assert torch.equal(*found)
