"""How many blocks a trace's running requests need on average: a pool that runs short at times."""

from __future__ import annotations

from collections.abc import Sequence

from bt_runner.replay.traffic.trace import TraceRequest
from bt_width import BlockTableLayout, ServingLimits


def average_pool_sizes(
    layouts: Sequence[BlockTableLayout], requests: Sequence[TraceRequest], acceptance: float
) -> tuple[int, ...]:
    """Return the blocks of each group's pool, the null block included.

    A pool holds what the requests that run at a time hold on average, and at the least
    the largest request.

    Args:
        layouts: The groups' plans.
        requests: The trace.
        acceptance: The share of drafts that turn out right, each after a right one.
    """
    limits = layouts[0].limits
    served = [r for r in requests if r.prompt_len + r.output_len <= limits.max_model_len]
    running = _running_requests(limits, served, acceptance)
    return tuple(1 + _blocks(layout, served, running) for layout in layouts)


def _running_requests(
    limits: ServingLimits, requests: Sequence[TraceRequest], acceptance: float
) -> float:
    """Return how many requests decode at a time, if every step is as full as it may be."""
    num_drafts = limits.num_speculative_tokens
    # 1 + acceptance + acceptance^2 + ..., a term for the last token and for each draft
    tokens_per_step = (
        1.0 + num_drafts
        if acceptance == 1
        else (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
    )
    decode_steps = sum(request.output_len for request in requests) / tokens_per_step
    tokens = sum(request.prompt_len for request in requests) + decode_steps * (1 + num_drafts)
    steps = tokens / limits.max_num_batched_tokens
    return min(decode_steps / max(steps, 1.0), limits.max_num_reqs, len(requests))


def _blocks(layout: BlockTableLayout, requests: Sequence[TraceRequest], running: float) -> int:
    most = layout.max_resident_blocks(layout.limits.max_num_batched_tokens)
    block_steps = steps = largest = 0
    for request in requests:
        # half of its output is there on average, and it runs as long as its output is
        halfway = request.prompt_len + request.output_len // 2
        block_steps += request.output_len * min(layout.num_blocks(halfway), most)
        steps += request.output_len
        longest = request.prompt_len + request.output_len
        largest = max(largest, min(layout.num_blocks(longest), most))
    return max(largest, round(running * block_steps / max(steps, 1)), 1)
