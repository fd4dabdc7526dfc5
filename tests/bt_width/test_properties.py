"""What holds of every layout, sought where it might not."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.plans import plan, plan_ranks

from bt_width import (
    NULL_BLOCK,
    PAD_SLOT,
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    get_block_table_width,
)

pytestmark = pytest.mark.fast

# A busy machine is slow, and that is no fault of the contract.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, number + 1) if number % n == 0])


ALIGNMENTS = st.none() | st.integers(1, 400)
BLOCK_SIZES = st.integers(1, 80) | st.sampled_from([128, 528, 544, 784, 1056])


@dataclass(frozen=True)
class Group:
    """A group of a small server, with the slots that its kind has."""

    spec: CacheSpec
    max_model_len: int
    kernel_block_size: int
    size: int
    interleave: int

    def layouts(self) -> list[BlockTableLayout]:
        return plan_ranks(
            self.spec,
            self.max_model_len,
            self.size,
            interleave=self.interleave,
            kernel_block_size=self.kernel_block_size,
        )


@st.composite
def attention_groups(draw: st.DrawFn, *, sharded: bool) -> Group:
    """Attention of any split, shards and interleave, with states no larger than fit."""
    block_size = draw(BLOCK_SIZES)
    kernel_block_size = draw(divisors(block_size))
    interleave = draw(divisors(block_size))
    size = draw(st.integers(1, 5))
    spec = AttentionSpec(block_size=block_size, sharded=sharded, token_alignment=draw(ALIGNMENTS))
    return Group(spec, draw(st.integers(1, 500)), kernel_block_size, size, interleave)


@st.composite
def any_groups(draw: st.DrawFn) -> Group:
    """A group of any kind."""
    block_size = draw(BLOCK_SIZES)
    extra = draw(st.integers(0, 5))
    whole: list[CacheSpec] = [
        MambaSpec(block_size=block_size, num_speculative_blocks=extra),
        MambaSpec(block_size=block_size, mode="align", num_speculative_blocks=extra),
        RingSpec(block_size=block_size),
    ]
    unsplit = draw(st.sampled_from(whole))
    window = SlidingWindowSpec(
        block_size=block_size,
        window=draw(st.integers(1, 100)),
        extra_retained_tokens=extra,
        token_alignment=draw(ALIGNMENTS),
    )
    length, size = draw(st.integers(1, 500)), draw(st.integers(1, 5))
    return draw(
        st.one_of(
            attention_groups(sharded=True),
            attention_groups(sharded=False),
            st.just(Group(unsplit, length, block_size, size, 1)),
            st.just(Group(window, length, draw(divisors(block_size)), size, 1)),
        )
    )


@st.composite
def rows(draw: st.DrawFn, group: Group) -> list[int]:
    """The block ids of the longest request, none of them null, none twice."""
    held = group.layouts()[0].max_num_blocks
    return draw(st.lists(st.integers(1, 10_000), min_size=held, max_size=held, unique=True))


@relaxed
@given(group=attention_groups(sharded=True) | attention_groups(sharded=False))
def test_a_row_covers_the_longest_request(group: Group) -> None:
    layout = group.layouts()[0]
    columns_tokens = layout.width * layout.kernel_block_size * layout.shards

    assert columns_tokens >= group.max_model_len
    assert layout.locate(group.max_model_len - 1).column < layout.width


@relaxed
@given(blocks=st.integers(1, 10_000), block_size=st.integers(1, 5_000), alignment=ALIGNMENTS)
def test_a_row_spans_a_multiple_of_the_alignment_and_is_minimal(
    blocks: int, block_size: int, alignment: int | None
) -> None:
    """Every shorter row is too short, or does not span a multiple."""
    unit = alignment or 1
    width = get_block_table_width(blocks, block_size, token_alignment=alignment)

    assert width >= blocks
    assert width * block_size % unit == 0
    assert not any(shorter * block_size % unit == 0 for shorter in range(blocks, width))


@relaxed
@given(group=any_groups(), split=st.data())
def test_a_split_multiplies_the_width(group: Group, split: st.DataObject) -> None:
    layout = group.layouts()[0]
    whole = plan(group.spec, group.max_model_len, size=group.size, interleave=group.interleave)

    assert layout.width == whole.width * layout.kernel_blocks_per_block
    assert layout.kernel_blocks_per_block * layout.kernel_block_size == layout.block_size


@relaxed
@given(group=any_groups(), longer=st.integers(1, 300))
def test_a_width_is_monotone_in_the_length(group: Group, longer: int) -> None:
    layout = group.layouts()[0]
    wider = Group(
        group.spec,
        group.max_model_len + longer,
        group.kernel_block_size,
        group.size,
        group.interleave,
    ).layouts()[0]

    assert wider.max_num_blocks >= layout.max_num_blocks
    assert wider.width >= layout.width


@relaxed
@given(group=any_groups())
def test_blocks_of_a_request_grow_from_none_to_the_most(group: Group) -> None:
    layout = group.layouts()[0]

    counts = [layout.num_blocks(length) for length in range(group.max_model_len + 1)]

    assert counts[0] == 0
    assert counts[-1] == layout.max_num_blocks
    assert counts == sorted(counts)
    assert layout.max_num_blocks * layout.kernel_blocks_per_block <= layout.width


@relaxed
@given(group=any_groups(), in_flight=st.integers(0, 400))
def test_what_is_reserved_grows_with_the_tokens_in_flight(group: Group, in_flight: int) -> None:
    layout = group.layouts()[0]
    reserved = layout.max_resident_blocks(in_flight)

    assert 1 <= reserved <= layout.max_num_blocks
    assert reserved <= layout.max_resident_blocks(in_flight + 1)


@relaxed
@given(group=attention_groups(sharded=True), data=st.data())
def test_positions_and_slots_of_ranks_are_a_bijection(group: Group, data: st.DataObject) -> None:
    """No position is lost, none has two owners, and no two share a slot of one rank."""
    layouts = group.layouts()
    kernel_block_ids = layouts[0].expand(data.draw(rows(group)))
    slots = [
        (rank, layout.slot(position, kernel_block_ids), position)
        for rank, layout in enumerate(layouts)
        for position in range(group.max_model_len)
    ]
    owned = [(rank, slot, position) for rank, slot, position in slots if slot != PAD_SLOT]

    assert sorted(position for _, _, position in owned) == list(range(group.max_model_len))
    assert len({(rank, slot) for rank, slot, _ in owned}) == group.max_model_len
    for rank, _, position in owned:
        assert layouts[0].locate(position).rank == rank


@relaxed
@given(group=attention_groups(sharded=True))
def test_local_lengths_of_all_ranks_sum_to_the_length(group: Group) -> None:
    layouts = group.layouts()
    for length in range(0, group.max_model_len + 1, 7):
        shares = [layout.local_length(length) for layout in layouts]

        assert sum(shares) == length
        owners = [layouts[0].locate(position).rank for position in range(length)]
        assert shares == [owners.count(rank) for rank in range(layouts[0].shards)]


@relaxed
@given(group=attention_groups(sharded=False), data=st.data())
def test_replicated_groups_give_every_rank_every_position(
    group: Group, data: st.DataObject
) -> None:
    layouts = group.layouts()
    kernel_block_ids = layouts[0].expand(data.draw(rows(group)))

    slots = [
        [layout.slot(position, kernel_block_ids) for position in range(group.max_model_len)]
        for layout in layouts
    ]

    assert all(rank_slots == slots[0] for rank_slots in slots)
    assert min(slots[0]) >= layouts[0].block_size
    assert len(set(slots[0])) == group.max_model_len


@relaxed
@given(group=attention_groups(sharded=False), data=st.data())
def test_a_slot_is_plain_logical_addressing(group: Group, data: st.DataObject) -> None:
    """Whatever the split: the block's id, its size, the token's place in it."""
    layout = group.layouts()[0]
    block_ids = data.draw(rows(group))
    kernel_block_ids = layout.expand(block_ids)

    for position in range(group.max_model_len):
        block, offset = divmod(position, layout.block_size)
        expected = block_ids[block] * layout.block_size + offset
        assert layout.slot(position, kernel_block_ids) == expected


@relaxed
@given(group=attention_groups(sharded=True), data=st.data())
def test_a_split_moves_no_token(group: Group, data: st.DataObject) -> None:
    """``expand`` then ``slot`` equals ``slot`` on blocks, on every rank."""
    block_ids = data.draw(rows(group))
    unsplit = plan_ranks(group.spec, group.max_model_len, group.size, interleave=group.interleave)

    for layout, whole in zip(group.layouts(), unsplit, strict=True):
        kernel_block_ids = layout.expand(block_ids)
        for position in range(group.max_model_len):
            assert layout.slot(position, kernel_block_ids) == whole.slot(position, block_ids)


@relaxed
@given(group=attention_groups(sharded=True), data=st.data())
def test_a_slot_is_the_located_place(group: Group, data: st.DataObject) -> None:
    layouts = group.layouts()
    kernel_block_ids = layouts[0].expand(data.draw(rows(group)))

    for rank, layout in enumerate(layouts):
        for position in range(group.max_model_len):
            place = layout.locate(position)
            expected = kernel_block_ids[place.column] * layout.kernel_block_size + place.offset
            found = layout.slot(position, kernel_block_ids)
            assert found == (expected if place.rank == rank else PAD_SLOT)


@relaxed
@given(group=attention_groups(sharded=True), data=st.data())
def test_a_padded_or_nulled_row_gives_the_same_slots(group: Group, data: st.DataObject) -> None:
    """Ids bare, padded to the width, or with a nulled prefix; only null columns lose theirs."""
    layout = group.layouts()[0]
    block_ids = data.draw(rows(group))
    nulled = data.draw(st.integers(0, len(block_ids)))
    bare = layout.expand(block_ids)
    padded = bare + [NULL_BLOCK] * (layout.width - len(bare))
    prefixed = layout.expand([NULL_BLOCK] * nulled + block_ids[nulled:])

    for position in range(group.max_model_len):
        slot = layout.slot(position, bare)
        in_prefix = layout.locate(position).column < nulled * layout.kernel_blocks_per_block
        assert layout.slot(position, padded) == slot
        assert layout.slot(position, prefixed) == (PAD_SLOT if in_prefix else slot)


@relaxed
@given(group=any_groups())
def test_a_layout_survives_its_text(group: Group) -> None:
    for layout in group.layouts():
        assert BlockTableLayout.from_json(layout.to_json()) == layout


@relaxed
@given(block_size=st.integers(1, 5000), num_tokens=st.integers(0, 2**31))
def test_a_state_column_is_that_of_the_last_token(block_size: int, num_tokens: int) -> None:
    """The state after a block's last token is still that block's."""
    layout = plan(MambaSpec(block_size=block_size, mode="align"), 2**31)
    column = layout.state_column(num_tokens)

    assert column * block_size <= max(num_tokens - 1, 0) < (column + 1) * block_size
