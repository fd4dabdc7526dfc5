"""A pool by default holds what a full batch holds on average, and the largest request."""

from __future__ import annotations

from bt_runner.replay.pool_sizes import average_pool_sizes
from bt_runner.replay.trace import TraceRequest
from bt_width import AttentionSpec, BlockTableLayout, CacheSpec, MambaSpec, ServingLimits


def _layout(spec: CacheSpec) -> BlockTableLayout:
    limits = ServingLimits(max_model_len=4096, max_num_reqs=4, max_num_batched_tokens=512)
    return BlockTableLayout.plan(spec, limits)


def _requests(*lengths: tuple[int, int]) -> list[TraceRequest]:
    return [
        TraceRequest(line=line, prompt_len=prompt, output_len=output)
        for line, (prompt, output) in enumerate(lengths, start=1)
    ]


def test_a_batch_of_equal_requests_holds_them_half_way() -> None:
    requests = _requests(*[(64, 128)] * 10)

    # 4 requests of 64 + 64 tokens in blocks of 16, and the null block
    assert average_pool_sizes([_layout(AttentionSpec(block_size=16))], requests) == (33,)


def test_a_request_counts_as_long_as_it_runs() -> None:
    requests = _requests((16, 30), (1600, 10), (16, 30), (1600, 10))

    # (60 steps of 2 blocks + 20 steps of 101) / 80 steps, of 4 requests; one needs 101
    expected = 4 * (60 * 2 + 20 * 101) // 80
    assert average_pool_sizes([_layout(AttentionSpec(block_size=16))], requests) == (1 + expected,)


def test_the_largest_request_fits_but_one_that_is_refused_does_not_count() -> None:
    requests = _requests((16, 1000), (3200, 1), (9000, 1))

    assert average_pool_sizes([_layout(AttentionSpec(block_size=16))], requests) == (202,)


def test_a_group_of_states_holds_one_a_request() -> None:
    requests = _requests(*[(64, 128)] * 10)

    assert average_pool_sizes([_layout(MambaSpec(block_size=16))], requests) == (5,)


def test_fewer_requests_than_rows_need_fewer_blocks() -> None:
    requests = _requests((64, 128), (64, 128))

    assert average_pool_sizes([_layout(AttentionSpec(block_size=16))], requests) == (17,)


def test_no_request_needs_one_block() -> None:
    assert average_pool_sizes([_layout(AttentionSpec(block_size=16))], []) == (2,)
