"""A replay ends with every request served, every check passed and every block back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.model_configs import glm_5_2, mamba2, nemotron_h_8b
from tests.support.replays import CutOptions, ReplayCase, drive, glm_case, own_trace

from bt_runner.replay.traffic.trace import TraceRequest

CASES = [
    pytest.param(replace(glm_case(), max_model_len=325_000, size=1), id="325000-on-one-rank"),
    pytest.param(replace(glm_case(), max_model_len=350_000, size=1), id="350000-on-one-rank"),
    pytest.param(glm_case(), id="two-ranks"),
    pytest.param(
        ReplayCase(
            config=glm_5_2(),
            options=CutOptions(block_size=32),
            max_model_len=9416,
            size=1,
            num_drafts=0,
        ),
        id="9416-in-blocks-of-32",
    ),
    pytest.param(
        replace(glm_case(), options=CutOptions(block_size=128, kernel_block_size=64)),
        id="blocks-of-128-split-in-two",
    ),
    pytest.param(
        ReplayCase(
            config=nemotron_h_8b(),
            options=CutOptions(mamba_mode="align"),
            max_model_len=8192,
        ),
        id="nemotron-with-kept-states",
    ),
    pytest.param(
        ReplayCase(
            config=mamba2(),
            options=CutOptions(),
            max_model_len=8192,
            size=1,
        ),
        id="states-only",
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_every_request_is_served_and_every_step_agrees(case: ReplayCase) -> None:
    trace = own_trace()
    replay = case.make(trace)

    refused = drive(replay, trace)

    summary = replay.summary
    assert refused == []
    assert summary.num_requests == len(trace)
    assert summary.num_checked_steps == summary.num_steps
    assert summary.num_output_tokens == sum(request.output_len for request in trace)


@pytest.mark.parametrize("case", [CASES[2], CASES[5]])
def test_no_block_is_lost(case: ReplayCase) -> None:
    trace = own_trace()
    replay = case.make(trace)
    drive(replay, trace)

    # what can still be found for the next request is free
    assert [pool.num_used for pool in replay.kv.pools] == [0] * len(replay.kv.pools)
    assert [pool.num_free for pool in replay.kv.pools] == [
        pool.capacity for pool in replay.kv.pools
    ]


def test_a_short_pool_preempts_and_serves_all_the_same() -> None:
    trace = [replace(request, hash_ids=()) for request in own_trace(16)]
    longest = max(request.prompt_len + request.output_len for request in trace)
    replay = replace(glm_case(), num_blocks=2 + longest // 128).make(trace)

    drive(replay, trace)

    assert replay.summary.num_preemptions > 0
    assert replay.summary.num_requests == len(trace)
    assert replay.summary.num_output_tokens == sum(request.output_len for request in trace)


def test_equal_beginnings_are_computed_once() -> None:
    trace = own_trace()
    own = [replace(request, hash_ids=()) for request in trace]
    with_hits, without = glm_case().make(trace), glm_case().make(own)

    drive(with_hits, trace)
    drive(without, own)

    assert with_hits.summary.hit_tokens > 0
    assert with_hits.summary.num_tokens < without.summary.num_tokens
    assert without.summary.hit_tokens == 0


def test_what_preempted_requests_find_again_is_not_counted_as_shared() -> None:
    """No two prompts begin alike here: whatever is hit was computed by the same request."""
    trace = [
        replace(request, hash_ids=tuple(1_000 * request.line + place for place in range(10)))
        for request in own_trace(16)
    ]
    trace = [replace(each, hash_ids=each.hash_ids[: -(-each.prompt_len // 512)]) for each in trace]
    longest = max(request.prompt_len + request.output_len for request in trace)
    replay = replace(glm_case(), num_blocks=10 + longest // 128).make(trace)

    drive(replay, trace)

    summary = replay.summary
    assert summary.num_preemptions > 0
    assert summary.hit_tokens == 0
    assert summary.rehit_tokens > 0
    shared = f"0 of {summary.prompt_tokens:,} (0.0%), and {summary.rehit_tokens:,} again"
    assert shared in summary.to_text()


def test_a_model_with_states_shares_nothing() -> None:
    case = ReplayCase(config=nemotron_h_8b(), options=CutOptions(), num_drafts=0, size=1)
    trace = own_trace(8)
    replay = case.make(trace)

    drive(replay, trace)

    assert replay.summary.hit_tokens == 0


def test_a_request_that_could_never_run_is_refused_and_the_rest_served() -> None:
    trace = own_trace(8)
    trace.insert(3, TraceRequest(line=99, prompt_len=9000, output_len=1000))
    replay = replace(glm_case(), max_model_len=9416).make(trace)

    refused = drive(replay, trace)

    assert refused == [99]
    assert (replay.summary.num_requests, replay.summary.num_refused) == (8, 1)


def test_at_the_traces_pace_requests_wait_for_their_time() -> None:
    trace = own_trace(8)
    at_once, in_time = glm_case().make(trace), glm_case().make(trace)

    drive(at_once, trace)
    drive(in_time, [replace(r, arrival_ms=r.line * 1e6) for r in trace], step_ms=25.0)

    # one at a time, so there is never more than one in a step
    assert in_time.summary.num_requests == 8
    assert in_time.summary.num_steps > at_once.summary.num_steps


def test_equal_seeds_give_equal_replays() -> None:
    trace = own_trace(12)
    first, second = glm_case().make(trace), glm_case().make(trace)

    drive(first, trace)
    drive(second, trace)

    assert first.summary.num_steps == second.summary.num_steps
    assert first.summary.used_blocks == second.summary.used_blocks


def test_drafts_that_turn_out_right_save_steps() -> None:
    trace = own_trace(12)
    drafting, plain = glm_case().make(trace), replace(glm_case(), num_drafts=0).make(trace)

    drive(drafting, trace)
    drive(plain, trace)

    assert drafting.summary.num_steps < plain.summary.num_steps
    assert drafting.summary.num_output_tokens == plain.summary.num_output_tokens
