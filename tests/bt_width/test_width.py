"""One function turns a number of blocks into a number of columns."""

from typing import Any

import pytest

from bt_width import BlockTableError, InvalidSpecError, get_block_table_width

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "kernel_block_size", "width"),
    [
        pytest.param(295, 32, 32, 296, id="9416-block-32"),
        pytest.param(3594, 64, 64, 3594, id="230000"),
        pytest.param(4688, 64, 64, 4688, id="300000"),
        pytest.param(5079, 64, 64, 5080, id="325000"),
        pytest.param(5469, 64, 64, 5470, id="350000"),
        pytest.param(16384, 64, 64, 16384, id="1048576-one-shard"),
        pytest.param(8192, 64, 64, 8192, id="1048576-two-shards"),
        pytest.param(410, 640, 128, 2050, id="262144-block-640-split"),
        pytest.param(683, 48, 16, 2064, id="32768-block-48"),
        pytest.param(63, 528, 16, 2112, id="32768-block-528"),
        pytest.param(42, 784, 16, 2352, id="32768-block-784"),
        pytest.param(1875, 64, 64, 1876, id="480000-four-shards"),
        pytest.param(2731, 48, None, 2736, id="131072-block-48"),
        pytest.param(2731, 48, 16, 8208, id="131072-block-48-split"),
        pytest.param(745, 176, 16, 8272, id="131072-block-176-split"),
        pytest.param(249, 528, 16, 8448, id="131072-block-528-split"),
        pytest.param(482, 544, 32, 8228, id="262144-block-544-split"),
        pytest.param(241, 4352, None, 241, id="1048576-block-4352"),
        pytest.param(241, 4352, 64, 16388, id="1048576-block-4352-split"),
        pytest.param(2560, 64, None, 2560, id="163840"),
    ],
)
def test_width_vectors(
    num_blocks: int, block_size: int, kernel_block_size: int | None, width: int
) -> None:
    """Widths that the field's own tables have, under the default alignment."""
    assert get_block_table_width(num_blocks, block_size, kernel_block_size) == width


def test_a_row_spans_a_multiple_of_128_tokens() -> None:
    """The first of the field's three tests: 3 blocks of 32 tokens become 4."""
    assert get_block_table_width(3, 32) == 4
    assert get_block_table_width(4, 32) == 4
    assert get_block_table_width(5, 32) == 8


def test_a_split_comes_after_the_alignment() -> None:
    """The second of the field's three tests: blocks are aligned, then cut into kernel blocks."""
    assert get_block_table_width(3, 32, 16) == 8


def test_without_an_alignment_nothing_is_rounded() -> None:
    """The third of the field's three tests: a recurrent group declares no alignment."""
    assert get_block_table_width(3, 32, token_alignment=None) == 3
    assert get_block_table_width(3, 32, 16, token_alignment=None) == 6


@pytest.mark.parametrize(
    ("token_alignment", "width"),
    [pytest.param(None, 33, id="native"), pytest.param(128, 36, id="aligned")],
)
def test_alignment_is_a_requirement_and_not_universal(
    token_alignment: int | None, width: int
) -> None:
    """Reported as https://github.com/flashinfer-ai/flashinfer/issues/3915"""
    assert get_block_table_width(33, 32, token_alignment=token_alignment) == width


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_row_spans_the_alignment(block_size: int) -> None:
    """Whatever the length, a row is a multiple of 128 tokens and not one unit too long.

    Reported as https://github.com/vllm-project/vllm/pull/39324
    """
    for num_blocks in range(1, 700):
        width = get_block_table_width(num_blocks, block_size)
        assert width * block_size % 128 == 0
        assert num_blocks <= width < num_blocks + max(128 // block_size, 1)


def test_an_alignment_that_the_block_covers_changes_nothing() -> None:
    assert get_block_table_width(7, 256, token_alignment=128) == 7
    assert get_block_table_width(7, 128, token_alignment=128) == 7


def test_an_alignment_goes_through_the_greatest_common_divisor() -> None:
    """Blocks of 48 tokens meet a multiple of 128 at every eighth block only."""
    assert get_block_table_width(1, 48) == 8
    assert get_block_table_width(9, 48) == 16


def test_a_width_is_a_plain_int_at_run_time() -> None:
    assert type(get_block_table_width(3, 32)) is int


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, 2.5, "16", [16]], ids=repr)
@pytest.mark.parametrize("argument", ["max_num_blocks", "block_size", "kernel_block_size"])
def test_a_bad_argument_is_refused_by_name(argument: str, bad: Any) -> None:
    """Zero, negative, bool, float and other types: never a ``TypeError``, always the name."""
    arguments: dict[str, Any] = {"max_num_blocks": 4, "block_size": 16, "kernel_block_size": 16}
    arguments[argument] = bad

    with pytest.raises(InvalidSpecError, match=argument):
        get_block_table_width(**arguments)


@pytest.mark.parametrize("argument", ["max_num_blocks", "block_size"])
def test_none_is_no_number(argument: str) -> None:
    arguments: dict[str, Any] = {"max_num_blocks": 4, "block_size": 16, argument: None}

    with pytest.raises(InvalidSpecError, match=argument):
        get_block_table_width(**arguments)


@pytest.mark.parametrize("bad", [0, -128, True, 128.0, "128"], ids=repr)
def test_a_bad_alignment_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match="token_alignment"):
        get_block_table_width(4, 16, token_alignment=bad)


@pytest.mark.parametrize(
    ("block_size", "kernel_block_size"),
    [
        pytest.param(64, 48, id="does-not-divide"),
        pytest.param(16, 32, id="larger-than-the-block"),
    ],
)
def test_a_kernel_block_that_does_not_divide_is_refused_with_both_numbers(
    block_size: int, kernel_block_size: int
) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        get_block_table_width(4, block_size, kernel_block_size)

    assert str(block_size) in str(caught.value)
    assert str(kernel_block_size) in str(caught.value)


def test_a_refusal_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="block_size") as caught:
        get_block_table_width(4, 0)

    assert isinstance(caught.value, BlockTableError)
