"""The contract against a naive second implementation, over everything that is small."""

import itertools

from tests.support import naive_contract

from bt_width import AttentionSpec, BlockTableLayout, ContextParallel, ServingLimits

BLOCK_SIZES = range(1, 13)
SHARDS = range(1, 5)
ALIGNMENTS = [None, *range(1, 9)]
LENGTHS = range(1, 201)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _limits(max_model_len: int, parallel: ContextParallel) -> ServingLimits:
    return ServingLimits(
        max_model_len=max_model_len,
        max_num_reqs=1,
        max_num_batched_tokens=1,
        context_parallel=parallel,
    )


def test_every_small_width() -> None:
    """All block sizes, splits, shards, alignments and lengths: no token is walked."""
    limits = {
        (shards, length): _limits(length, ContextParallel(size=shards))
        for shards, length in itertools.product(SHARDS, LENGTHS)
    }
    for block_size, alignment in itertools.product(BLOCK_SIZES, ALIGNMENTS):
        spec = AttentionSpec(block_size=block_size, token_alignment=alignment)
        for kernel_block_size in _divisors(block_size):
            for (shards, length), planned in limits.items():
                layout = BlockTableLayout.plan(spec, planned, kernel_block_size)
                expected = naive_contract.width_of_row(
                    length, block_size, kernel_block_size, shards, alignment
                )

                assert layout.width == expected, layout


def test_every_small_slot() -> None:
    """All block sizes, splits, shards and interleaves at the longest length: every token."""
    longest = LENGTHS[-1]
    block_ids = [3 * block + 2 for block in range(longest)]
    for block_size, shards in itertools.product(BLOCK_SIZES, SHARDS):
        for interleave in _divisors(block_size):
            hands = naive_contract.deal_positions(longest, shards, interleave)
            expected = [naive_contract.slots_of_rank(hand, block_size, block_ids) for hand in hands]
            for kernel_block_size in _divisors(block_size):
                for rank in range(shards):
                    parallel = ContextParallel(size=shards, rank=rank, interleave=interleave)
                    layout = BlockTableLayout.plan(
                        AttentionSpec(block_size=block_size),
                        _limits(longest, parallel),
                        kernel_block_size,
                    )
                    held = layout.expand(block_ids[: layout.num_blocks(longest)])
                    found = {
                        position: slot
                        for position in range(longest)
                        if (slot := layout.slot(position, held)) != naive_contract.PAD_SLOT
                    }

                    assert found == expected[rank], layout
                    assert layout.local_length(longest) == len(expected[rank]), layout


def test_every_small_local_length() -> None:
    """A rank's share of every length is the hand that dealing gives it."""
    for block_size, shards in itertools.product(BLOCK_SIZES, SHARDS):
        for interleave in _divisors(block_size):
            layout = BlockTableLayout.plan(
                AttentionSpec(block_size=block_size),
                _limits(100, ContextParallel(size=shards, interleave=interleave)),
            )
            for length in range(0, 101, 7):
                hands = naive_contract.deal_positions(length, shards, interleave)

                assert [layout.local_length(length, rank) for rank in range(shards)] == [
                    len(hand) for hand in hands
                ], (layout, length)
