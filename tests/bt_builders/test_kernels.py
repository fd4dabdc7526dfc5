"""Interpreted kernels equal their references bit for bit, in any order of their programs."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.support.addressings import Rows, rows, states
from tests.support.interpreted import shuffled_programs
from tests.support.plain_builders import int32
from tests.support.poison import POISON, Guarded, guarded, misaligned

from bt_builders import kernels, reference
from bt_builders.operations import (
    CommittedStates,
    DraftRows,
    ExpandedRows,
    MambaStates,
    Operations,
    StateBatch,
    TokenLens,
)
from bt_width import Addressing

pytestmark = pytest.mark.fast

ROW_SHAPES = [
    pytest.param(rows(9, 16, 1, 1, 0, 1, 140), id="plain"),
    pytest.param(rows(9, 16, 4, 1, 0, 1, 140), id="compressed"),
    pytest.param(rows(7, 8, 1, 3, 1, 4, 160), id="sharded"),
    pytest.param(rows(7, 8, 2, 2, 1, 8, 110), id="both"),
    pytest.param(rows(3, 16, 1, 1, 0, 1, 140), id="narrower-than-the-requests"),
    pytest.param(rows(600, 1, 1, 1, 0, 1, 600), id="longer-than-a-tile"),
]


def outputs(sizes: Sequence[int], dtype: torch.dtype = torch.int32) -> list[Guarded]:
    return [guarded(size, dtype) for size in sizes]


def assert_same(ours: Sequence[Guarded], theirs: Sequence[Guarded]) -> None:
    """The written parts are equal, and what lies around them is untouched."""
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.inner, other.inner)
        assert mine.intact
        assert other.intact


def in_both(run: Callable[[Operations], list[Guarded]], seed: int) -> None:
    expected = run(reference)
    with shuffled_programs(seed):
        found = run(kernels)
    assert_same(found, expected)


def ragged_batch(
    draw: random.Random, num_reqs: int, max_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query starts and lengths of requests, at odd addresses.

    Some have no tokens, and some fewer in all than in this step: padding rows, and a
    device that knows better than the host.
    """
    starts = [0]
    lens = []
    for _ in range(num_reqs):
        query_len = draw.choice([0, 1, 1, 2, 4])
        starts.append(starts[-1] + query_len)
        lens.append(draw.choice([draw.randint(0, query_len), draw.randint(query_len, max_len)]))
    return misaligned(int32(starts)), misaligned(int32(lens))


def poisoned_table(draw: random.Random, num_reqs: int, width: int) -> torch.Tensor:
    """Ids near the int32 limit in rows that lie apart, with poison between them."""
    table = torch.full((num_reqs, width + 3), POISON, dtype=torch.int32)
    ids = [[draw.choice([0, POISON - draw.randint(1, 99)]) for _ in range(width)] for _ in table]
    table[:, :width] = torch.tensor(ids, dtype=torch.int32).view(num_reqs, width)
    return table[:, :width]


@pytest.mark.parametrize("num_reqs", [0, 1, 5, 130])
@pytest.mark.parametrize("shape", ROW_SHAPES)
def test_token_lens(shape: Rows, num_reqs: int) -> None:
    draw = random.Random(num_reqs)
    starts, lens = ragged_batch(draw, num_reqs, shape.addressing.max_tokens)
    num_tokens = int(starts[-1]) + 3

    def run(operations: Operations) -> list[Guarded]:
        out = outputs([num_tokens] * 2)
        target = TokenLens(*(each.inner for each in out))
        operations.token_lens(*shape, starts, lens, target)
        return out

    in_both(run, num_reqs)


@pytest.mark.parametrize("num_tokens", [127, 128, 129, 256, 257])
def test_token_lens_at_the_edges_of_tiles(num_tokens: int) -> None:
    starts, lens = int32(range(num_tokens + 1)), int32(range(1, num_tokens + 1))

    def run(operations: Operations) -> list[Guarded]:
        out = outputs([num_tokens] * 2)
        target = TokenLens(*(each.inner for each in out))
        operations.token_lens(*rows(300, 1, 1, 1, 0, 1, 300), starts, lens, target)
        return out

    in_both(run, num_tokens)


@pytest.mark.parametrize("num_reqs", [0, 1, 6])
@pytest.mark.parametrize("shape", ROW_SHAPES)
def test_expand_rows(shape: Rows, num_reqs: int) -> None:
    """Twice through the same buffers: the second step clears what the first one left."""
    draw = random.Random(num_reqs)
    batches = [ragged_batch(draw, num_reqs, shape.addressing.max_tokens) for _ in range(2)]
    tables = [poisoned_table(draw, num_reqs, shape.addressing.width) for _ in batches]
    rows = max(int(starts[-1]) for starts, _ in batches) + 2

    def run(operations: Operations) -> list[Guarded]:
        out = outputs([rows, rows, rows * shape.addressing.width])
        num_live = guarded(rows, torch.int32, fill=0)
        for (starts, lens), table in zip(batches, tables, strict=True):
            operations.expand_rows(
                *shape,
                starts,
                lens,
                table,
                TokenLens(out[0].inner, out[1].inner),
                ExpandedRows(out[2].inner.view(rows, shape.addressing.width), num_live.inner),
            )
        return [*out, num_live]

    in_both(run, num_reqs)


@pytest.mark.parametrize("num_tokens", [0, 1, 255, 256, 257])
@pytest.mark.parametrize("shape", ROW_SHAPES)
def test_compress_slots(shape: Rows, num_tokens: int) -> None:
    draw = random.Random(num_tokens)
    positions = torch.tensor([draw.randint(-1, 99) for _ in range(num_tokens)], dtype=torch.int64)
    slots = [draw.choice([-1, 0, 2**40 + draw.randint(0, 99)]) for _ in range(num_tokens)]
    slot_mapping = misaligned(torch.tensor(slots, dtype=torch.int64))

    def run(operations: Operations) -> list[Guarded]:
        out = outputs([num_tokens], torch.int64)
        operations.compress_slots(shape.tokens_per_state, positions, slot_mapping, out[0].inner)
        return out

    in_both(run, num_tokens)


@pytest.mark.parametrize("num_reqs", [0, 1, 127, 129])
@pytest.mark.parametrize(
    "shape",
    [*ROW_SHAPES, pytest.param(rows(1, 4, 1, 1, 0, 1, 140, is_ring=True), id="ring")],
)
def test_step_drafts(shape: Rows, num_reqs: int) -> None:
    """Standing still, then three tokens on, some of them past the longest request."""
    draw = random.Random(num_reqs)
    table = poisoned_table(draw, num_reqs, shape.addressing.width)
    lens = int32(
        [draw.choice([0, draw.randint(1, shape.addressing.max_tokens)]) for _ in range(num_reqs)]
    )
    lens[-1:] = shape.addressing.max_tokens - 1

    def run(operations: Operations) -> list[Guarded]:
        ints, longs = outputs([num_reqs] * 2), outputs([num_reqs] * 2, torch.int64)
        ints[0].inner.copy_(lens)
        drafts = DraftRows(*(each.inner for each in (*ints, *longs)))
        for step in (0, 1, 1, 1):
            operations.step_drafts(*shape, table, drafts, step)
        return ints + longs

    in_both(run, num_reqs)


STATE_GROUPS = [
    pytest.param((states(4, None, 4), 0), id="none"),
    pytest.param((states(1, None, 1), 0), id="one-column"),
    pytest.param((states(12, 16, 3), 0), id="align"),
    pytest.param((states(12, 16, 1), -1), id="pad-minus-1"),
    pytest.param((states(5, 16, 2), 0), id="narrower-than-the-requests"),
    pytest.param((states(150, 1, 4), 0), id="one-token-a-column"),
]


def state_batch(draw: random.Random, addressing: Addressing, num_reqs: int) -> StateBatch:
    lens = [draw.choice([0, draw.randint(1, 140)]) for _ in range(num_reqs)]
    computed = [max(n - draw.randint(1, 5), 0) for n in lens]
    hostile = (-(2**31), -7, 2**31 - 1)
    accepted = [
        draw.choice([draw.randint(0, addressing.states_per_step + 1), draw.choice(hostile)])
        for _ in lens
    ]
    for counts in (lens, computed):
        if counts:
            counts[draw.randrange(len(counts))] = draw.choice(hostile)
    table = poisoned_table(draw, num_reqs, addressing.width)
    vectors = [misaligned(int32(values)) for values in (computed, lens, accepted)]
    return StateBatch(table, *vectors)


@pytest.mark.parametrize("num_reqs", [0, 1, 128, 130])
@pytest.mark.parametrize("group", STATE_GROUPS)
def test_state_ids(group: tuple[Addressing, int], num_reqs: int) -> None:
    addressing, pad = group
    batch = state_batch(random.Random(num_reqs), addressing, num_reqs)

    def run(operations: Operations) -> list[Guarded]:
        ints = outputs([num_reqs, num_reqs * addressing.states_per_step, num_reqs])
        bools = [guarded(num_reqs, torch.bool, fill=1) for _ in range(2)]
        operations.state_ids(
            addressing,
            pad,
            batch,
            MambaStates(
                ints[0].inner,
                ints[1].inner.view(num_reqs, addressing.states_per_step),
                ints[2].inner,
                bools[0].inner,
                bools[1].inner,
            ),
        )
        for each in ints:
            assert each.intact
        return [*ints, *(widen(each) for each in bools)]

    in_both(run, num_reqs)


def widen(flags: Guarded) -> Guarded:
    """Flags as ints: a guard of canaries is all True in bools."""
    out = guarded(flags.inner.numel(), torch.int32)
    out.inner.copy_(flags.inner)
    return out


@pytest.mark.parametrize("num_reqs", [0, 1, 128, 130])
@pytest.mark.parametrize("group", STATE_GROUPS)
def test_commit_states(group: tuple[Addressing, int], num_reqs: int) -> None:
    addressing, pad = group
    batch = state_batch(random.Random(num_reqs), addressing, num_reqs)
    accepted = state_batch(random.Random(num_reqs + 1), addressing, num_reqs).num_accepted_tokens
    num_copies = -(-addressing.states_per_step // addressing.tokens_per_state_column)

    def run(operations: Operations) -> list[Guarded]:
        out = outputs([num_reqs * num_copies, num_reqs * num_copies, num_reqs])
        copies = [each.inner.view(num_reqs, num_copies) for each in out[:2]]
        committed = CommittedStates(copies[0], copies[1], out[2].inner)
        operations.commit_states(addressing, pad, batch, accepted, committed)
        return out

    in_both(run, num_reqs)


@pytest.mark.parametrize("operations", [reference, kernels], ids=["reference", "kernel"])
@pytest.mark.parametrize(("accepted", "clamped"), [(5, 4), (2**31 - 1, 4), (-7, 1), (2, 2)])
def test_an_accepted_count_out_of_range_never_leads_into_another_row(
    operations: Operations, accepted: int, clamped: int
) -> None:
    addressing = states(4, None, 4)
    table = int32([1, 2, 3, 4, 5, 6, 7, 8]).view(2, 4)
    counts = int32([accepted, 1])
    batch = StateBatch(table, int32([20, 20]), int32([24, 24]), counts)
    ints = torch.zeros(2, 2, dtype=torch.int32)
    found = MambaStates(
        ints[0],
        torch.zeros(2, 4, dtype=torch.int32),
        ints[1],
        *torch.zeros(2, 2, dtype=torch.bool),
    )

    operations.state_ids(addressing, 0, batch, found)

    assert found.source_ids.tolist() == [clamped, 5]
    assert found.num_accepted_tokens.tolist() == [clamped, 1]
    assert found.state_ids.tolist() == table.tolist()

    committed = CommittedStates(
        torch.full((2, 1), 9, dtype=torch.int32),
        torch.full((2, 1), 9, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
    )
    operations.commit_states(addressing, 0, batch, counts, committed)

    assert committed.num_accepted_tokens.tolist() == [clamped, 1]
    assert committed.source_ids.tolist() == committed.target_ids.tolist() == [[0], [0]]


@pytest.mark.parametrize("operations", [reference, kernels], ids=["reference", "kernel"])
def test_a_length_from_the_device_is_at_most_what_a_row_is_planned_for(
    operations: Operations,
) -> None:
    addressing, ratio = rows(4, 16, 1, 1, 0, 1, 60)
    starts, lens = int32([0, 1, 2, 3]), int32([2**31 - 1, -5, 61])
    out = TokenLens(*torch.zeros(2, 3, dtype=torch.int32))

    operations.token_lens(addressing, ratio, starts, lens, out)

    assert out.seq_lens.tolist() == out.local_lens.tolist() == [60, 0, 60]


@pytest.mark.parametrize("operations", [reference, kernels], ids=["reference", "kernel"])
def test_a_count_of_live_columns_beyond_the_width_clears_one_row(operations: Operations) -> None:
    """What memory held after it was lost is no count: no neighbour's row is written."""
    addressing, ratio = rows(4, 16, 1, 1, 0, 1, 60)
    table = torch.full((3, 4), POISON, dtype=torch.int32)
    num_live = int32([2**31 - 1, 0, 0])
    lens = TokenLens(*torch.zeros(2, 1, dtype=torch.int32))
    source = int32([5, 6, 7, 8]).view(1, 4)

    operations.expand_rows(
        addressing,
        ratio,
        int32([0, 1]),
        int32([20]),
        source,
        lens,
        ExpandedRows(table[:1], num_live[:1]),
    )

    assert table.tolist() == [[5, 6, 0, 0], [POISON] * 4, [POISON] * 4]
