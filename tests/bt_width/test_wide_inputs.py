"""Requests of up to 2^31 tokens, and block sizes that are no power of two."""

import pytest
from tests.support.plans import plan, plan_ranks

from bt_width import (
    PAD_SLOT,
    AttentionSpec,
    BlockTableLayout,
    Location,
    MambaSpec,
    RowOverflowError,
    addressable_tokens,
    get_block_table_width,
)

pytestmark = pytest.mark.fast

LONGEST = 2**31
BLOCK_SIZES = [1, 48, 176, 528, 544, 784, 1056, 1152, 1600, 2112, 4192, 4352]
LENGTHS = [1, 127, 128, 129, 131_072, 1_048_577, LONGEST - 1, LONGEST]


def _kernel_block_size(block_size: int) -> int:
    return 16 if block_size % 16 == 0 else block_size


@pytest.mark.parametrize("max_model_len", LENGTHS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_wide_row_covers_spans_and_is_minimal(block_size: int, max_model_len: int) -> None:
    """What a width promises, without its formula."""
    layout = plan(
        AttentionSpec(block_size=block_size),
        max_model_len,
        kernel_block_size=_kernel_block_size(block_size),
    )
    blocks, remainder = divmod(layout.width, layout.kernel_blocks_per_block)

    assert remainder == 0
    assert (layout.max_num_blocks - 1) * block_size < max_model_len
    assert layout.max_num_blocks * block_size >= max_model_len
    assert blocks * block_size % 128 == 0
    assert not any(
        shorter * block_size % 128 == 0 for shorter in range(layout.max_num_blocks, blocks)
    )


@pytest.mark.parametrize(
    ("block_size", "kernel_block_size", "num_blocks", "width"),
    [
        pytest.param(1, 1, 2147483648, 2147483648, id="1"),
        pytest.param(48, 16, 44739243, 134217744, id="48"),
        pytest.param(176, 16, 12201612, 134217776, id="176"),
        pytest.param(528, 16, 4067204, 134217864, id="528"),
        pytest.param(4352, 64, 493448, 33554464, id="4352"),
    ],
)
def test_the_longest_row_in_numbers(
    block_size: int, kernel_block_size: int, num_blocks: int, width: int
) -> None:
    layout = plan(
        AttentionSpec(block_size=block_size), LONGEST, kernel_block_size=kernel_block_size
    )

    assert layout.max_num_blocks == num_blocks
    assert layout.width == width


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_last_position_has_a_slot_and_the_next_has_none(block_size: int) -> None:
    """Int32 ends at the row of 2^31 tokens, though an aligned row has columns left."""
    layout = plan(
        AttentionSpec(block_size=block_size),
        LONGEST,
        kernel_block_size=_kernel_block_size(block_size),
    )
    last = LONGEST - 1
    ids = _OneId(column=layout.locate(last).column, kernel_block_id=2_147_480_000)

    assert layout.slot(last, ids) == 2_147_480_000 * layout.kernel_block_size + (
        last % layout.kernel_block_size
    )
    assert layout.slot(LONGEST, ids) == PAD_SLOT


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_no_row_addresses_a_token_without_a_slot(block_size: int) -> None:
    """An aligned row of 2^31 tokens has columns for more; int32 has not."""
    assert addressable_tokens(plan(AttentionSpec(block_size=block_size), LONGEST)) == LONGEST


class _OneId(list[int]):
    """A row of which one column alone is ever looked at: a real one would fill the memory."""

    def __init__(self, *, column: int, kernel_block_id: int) -> None:
        super().__init__()
        self._column, self._id = column, kernel_block_id

    def __len__(self) -> int:
        return self._column + 1

    def __getitem__(self, column: object) -> int:  # type: ignore[override]  # one index only
        if column != self._column:
            raise AssertionError(f"column {column!r} was read instead of {self._column}")
        return self._id


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_place_of_a_wide_position_puts_it_together_again(block_size: int) -> None:
    for position in (0, block_size - 1, block_size, LONGEST // 3, LONGEST - 1):
        layout = plan(
            AttentionSpec(block_size=block_size),
            LONGEST,
            kernel_block_size=_kernel_block_size(block_size),
        )
        place = layout.locate(position)

        assert place.column * layout.kernel_block_size + place.offset == position
        assert 0 <= place.offset < layout.kernel_block_size


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_wide_local_lengths_sum_to_the_length(block_size: int) -> None:
    layouts = plan_ranks(AttentionSpec(block_size=block_size), LONGEST, 7, interleave=block_size)

    for length in (LONGEST, LONGEST - 1, LONGEST // 2 + 1):
        assert sum(layout.local_length(length) for layout in layouts) == length


def test_a_wide_position_of_many_ranks() -> None:
    """Worked by hand: 2^31 - 1 = 95443 * 22500 + 16147 in blocks of 4500 over 5 ranks."""
    layout = plan_ranks(
        AttentionSpec(block_size=4500), LONGEST, 5, interleave=9, kernel_block_size=900
    )[0]

    # 16147 = 1794 runs of 9 and 1; run 1794 is rank 4's, its 359th; 358 * 9 + 1 = 3223
    assert layout.locate(LONGEST - 1) == Location(rank=4, column=95443 * 5 + 3, offset=523)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_longest_request_holds_the_most_blocks(block_size: int) -> None:
    for spec in (
        AttentionSpec(block_size=block_size),
        MambaSpec(block_size=block_size, mode="align", num_speculative_blocks=3),
    ):
        layout = plan(spec, LONGEST)

        assert layout.num_blocks(LONGEST) == layout.max_num_blocks
        with pytest.raises(RowOverflowError):
            layout.num_blocks(LONGEST + 1)


def test_an_alignment_may_be_wide() -> None:
    assert get_block_table_width(1, 48, token_alignment=2**31) == 2**27
    assert get_block_table_width(2**27 + 1, 48, token_alignment=2**31) == 2**28


def test_a_plan_of_the_longest_row_is_quick_to_tell() -> None:
    """Nothing is proportional to the length: the text, the words, the digest."""
    layout = plan(AttentionSpec(block_size=1), LONGEST)

    assert BlockTableLayout.from_json(layout.to_json()).digest() == layout.digest()
    assert "2147483648 columns" in layout.explain()
