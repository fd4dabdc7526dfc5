"""How many blocks a trace's running requests need on average: a pool that runs short at times."""

from __future__ import annotations

from collections.abc import Sequence

from bt_runner.replay.trace import TraceRequest
from bt_width import BlockTableLayout


def average_pool_sizes(
    layouts: Sequence[BlockTableLayout], requests: Sequence[TraceRequest]
) -> tuple[int, ...]:
    """Return the blocks of each group's pool, the null block included.

    A pool holds what a full batch holds on average over time, and at the least the
    largest request.
    """
    return tuple(1 + _average_blocks(layout, requests) for layout in layouts)


def _average_blocks(layout: BlockTableLayout, requests: Sequence[TraceRequest]) -> int:
    limits = layout.limits
    most = layout.max_resident_blocks(limits.max_num_batched_tokens)
    block_steps = steps = largest = 0
    for request in requests:
        longest = request.prompt_len + request.output_len
        if longest > limits.max_model_len:
            continue
        # half of its output is there on average, and it runs as long as its output is
        halfway = request.prompt_len + request.output_len // 2
        block_steps += request.output_len * min(layout.num_blocks(halfway), most)
        steps += request.output_len
        largest = max(largest, min(layout.num_blocks(longest), most))
    running = min(limits.max_num_reqs, len(requests))
    return max(largest, running * block_steps // max(steps, 1), 1)
