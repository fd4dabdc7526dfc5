"""What the checks of vLLM's tables take off the host in a step of 256 decodes of 2,048 tokens.

Over the attributes that vLLM's outputs and runners have, so that vLLM need not be installed. A
sound step must have no finding and a planted one must be found; without that there is no time.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from bt_tables.integrations.vllm.layouts import plan_groups
from bt_tables.integrations.vllm.runner_check import RunnerCheck, RunnerStep
from bt_tables.integrations.vllm.settings import Settings
from bt_tables.sanitizer import BlockTableFaultError
from bt_width import ServingLimits

NUM_REQS, LENGTH, BLOCK = 256, 2048, 16
ROUNDS = 30


class FullAttentionSpec:
    """What layouts are planned from; its parent's name says what it is."""

    block_size = BLOCK
    dcp_sharded = True
    block_table_token_alignment = 128


FullAttentionSpec.__name__ = "AttentionSpec"


def output(new: list[Any], cached: list[str]) -> Any:
    """Return what a scheduler says of a step in which no request gets a block."""
    return SimpleNamespace(
        finished_req_ids=set(),
        preempted_req_ids=None,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=cached,
            new_block_ids=[None] * len(cached),
            num_computed_tokens=[LENGTH - 1] * len(cached),
            resumed_req_ids=set(),
        ),
        scheduled_spec_decode_tokens={},
    )


def main() -> None:
    """Print the processor time of following a step and of checking it."""
    torch.set_num_threads(1)
    blocks_of_row = LENGTH // BLOCK
    num_blocks = NUM_REQS * blocks_of_row + 1
    names = [f"request-{at}" for at in range(NUM_REQS)]
    table = torch.arange(1, num_blocks, dtype=torch.int32).view(NUM_REQS, blocks_of_row)
    limits = ServingLimits(max_model_len=LENGTH, max_num_reqs=NUM_REQS, max_num_batched_tokens=8192)
    groups, _ = plan_groups([SimpleNamespace(kv_cache_spec=FullAttentionSpec())], limits)
    check = RunnerCheck(groups, num_blocks, Settings(), rank=0)
    new = [
        SimpleNamespace(req_id=name, block_ids=[row], num_computed_tokens=LENGTH - 1)
        for name, row in zip(names, table.tolist(), strict=True)
    ]
    check.follow(output(new, []))
    step = RunnerStep(
        block_tables=[table],
        slot_mappings=[table[:, -1].long() * BLOCK + BLOCK - 1],
        seq_lens=torch.full((NUM_REQS,), LENGTH, dtype=torch.int32),
        query_start_loc=torch.arange(NUM_REQS + 1, dtype=torch.int32),
        request_ids=names,
    )
    check.check(step)
    table[3, 5] += 1
    try:
        check.check(step)
    except BlockTableFaultError:
        table[3, 5] -= 1
    else:
        raise SystemExit("a planted fault was not found")

    decode = output([], names)
    print(f"{platform.machine()}, torch {torch.__version__}, one thread, processor time in ms")
    for name, work in (
        ("follow the scheduler", lambda: check.follow(decode)),
        ("count holders, list rows", lambda: (check._given.holders(), check._given.rows(names))),
        ("find blocks written twice", lambda: list(check._given.written_twice(names))),
        ("check, all of it", lambda: check.check(step)),
        ("a million turns of a loop", _loop),
    ):
        best, median = _times(work)
        print(f"{name:28} best {best:6.2f}, median {median:6.2f}")


def _times(work: Callable[[], Any]) -> tuple[float, float]:
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        times.append((time.process_time() - start) * 1e3)
    return min(times), statistics.median(times)


def _loop() -> None:
    for _ in range(1_000_000):
        pass


if __name__ == "__main__":
    main()
