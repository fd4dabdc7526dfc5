"""A pool by default holds what a full batch holds on average, and the largest request."""

from __future__ import annotations

from bt_runner.replay.pool_sizes import average_pool_sizes
from bt_runner.replay.traffic.trace import TraceRequest
from bt_width import AttentionSpec, BlockTableLayout, CacheSpec, MambaSpec, ServingLimits

ATTENTION = AttentionSpec(block_size=16)


def _pool(
    requests: list[TraceRequest],
    spec: CacheSpec = ATTENTION,
    *,
    num_drafts: int = 0,
    acceptance: float = 0.0,
    max_num_batched_tokens: int = 512,
) -> int:
    limits = ServingLimits(
        max_model_len=4096,
        max_num_reqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=num_drafts,
    )
    (size,) = average_pool_sizes([BlockTableLayout.plan(spec, limits)], requests, acceptance)
    return size


def _requests(*lengths: tuple[int, int]) -> list[TraceRequest]:
    return [
        TraceRequest(line=line, prompt_len=prompt, output_len=output)
        for line, (prompt, output) in enumerate(lengths, start=1)
    ]


def test_a_batch_of_equal_requests_holds_them_half_way() -> None:
    # 4 requests of 64 + 64 tokens in blocks of 16, and the null block
    assert _pool(_requests(*[(64, 128)] * 10)) == 33


def test_a_request_counts_as_long_as_it_runs() -> None:
    requests = _requests((16, 30), (640, 10), (16, 30), (640, 10))

    # (60 steps of 2 blocks + 20 steps of 41) / 80 steps, of 4 requests
    assert _pool(requests, max_num_batched_tokens=4096) == 1 + 4 * (60 * 2 + 20 * 41) // 80


def test_long_prompts_leave_room_for_few_at_a_time() -> None:
    requests = _requests(*[(1600, 64)] * 10)

    # 640 decode steps in the (16,000 + 640) / 512 steps that all tokens take would be 19 at a
    # time, and in (16,000 + 640) / 32 steps they are 1.23, each of 102 blocks
    assert _pool(requests) == 1 + 4 * 102
    assert _pool(requests, max_num_batched_tokens=32) == 1 + round(640 * 32 / 16_640 * 102)


def test_drafts_that_turn_out_right_shorten_a_requests_time() -> None:
    requests = _requests(*[(1600, 64)] * 10)

    plain = _pool(requests, max_num_batched_tokens=48)
    drafting = _pool(requests, num_drafts=3, acceptance=1.0, max_num_batched_tokens=48)

    assert drafting < plain


def test_the_largest_request_fits_but_one_that_is_refused_does_not_count() -> None:
    assert _pool(_requests((16, 1000), (3200, 1), (9000, 1)), max_num_batched_tokens=8) == 202


def test_a_group_of_states_holds_one_a_request() -> None:
    assert _pool(_requests(*[(64, 128)] * 10), MambaSpec(block_size=16)) == 5


def test_fewer_requests_than_rows_need_fewer_blocks() -> None:
    assert _pool(_requests((64, 128), (64, 128))) == 17


def test_no_request_needs_one_block() -> None:
    assert _pool([]) == 2
