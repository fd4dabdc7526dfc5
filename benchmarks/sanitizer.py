"""What a checked step costs: bytes and microseconds, beside reading the whole tables.

A uniform decode of 256 requests of 8,192 tokens, three drafts each, in tables for 1,048,576
tokens: full attention, a sliding window and recurrent states. Equality comes first: a sound step
must have no fault and a planted one must be found; without that there is no time.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from bt_tables import BlockTableSanitizer, StagedBlockTables, StepBatch
from bt_tables.sanitizer import FaultKind
from bt_width import (
    NULL_BLOCK,
    AttentionSpec,
    BlockTableLayout,
    MambaSpec,
    ServingLimits,
    SlidingWindowSpec,
)

NUM_REQS = 256
QUERY_LEN = 4
CONTEXT = 8192
BLOCK_SIZE = 64
WINDOW = 4096
ID_BYTES, SLOT_BYTES, COUNT_BYTES, CLAIM_BYTES = 4, 8, 4, 16
LIMITS = ServingLimits(
    max_model_len=1_048_576,
    max_num_reqs=NUM_REQS,
    max_num_batched_tokens=8192,
    num_speculative_tokens=QUERY_LEN - 1,
)


class Step(NamedTuple):
    """The arguments of a check."""

    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_blocks_of_row: torch.Tensor
    ref_counts: tuple[torch.Tensor, ...]

    def check(self, sanitizer: BlockTableSanitizer) -> list[tuple[FaultKind, int | None]]:
        """Return the kinds and groups of what a check finds."""
        report = sanitizer.check(
            self.block_tables,
            self.slot_mappings,
            self.seq_lens,
            self.query_start_loc,
            num_blocks_of_row=self.num_blocks_of_row,
            ref_counts=self.ref_counts,
        )
        return [(finding.kind, finding.group) for finding in report.findings]


def plan() -> list[BlockTableLayout]:
    """Plan the three groups."""
    specs = (
        AttentionSpec(block_size=BLOCK_SIZE),
        SlidingWindowSpec(block_size=BLOCK_SIZE, window=WINDOW),
        MambaSpec(block_size=BLOCK_SIZE, mode="align", num_speculative_blocks=QUERY_LEN - 1),
    )
    return [BlockTableLayout.plan(spec, LIMITS) for spec in specs]


def decode_step(layouts: list[BlockTableLayout], device: str) -> tuple[Step, list[int]]:
    """Fill tables for one decode step; return it and the pools' sizes."""
    blocks = [layout.num_blocks(CONTEXT) for layout in layouts]
    pools = [1 + NUM_REQS * count for count in blocks]
    tables = StagedBlockTables(layouts, device=device, num_blocks=pools)
    gone = (CONTEXT - QUERY_LEN - WINDOW + 1) // BLOCK_SIZE
    references = [torch.ones(pool, dtype=torch.int32) for pool in pools]
    for row in range(NUM_REQS):
        ids = [list(range(1 + row * count, 1 + (row + 1) * count)) for count in blocks]
        tables.append_block_ids(row, ids)
        tables.null_prefix(row, 1, gone)
        references[1][ids[1][:gone]] = 0
    starts = torch.arange(0, NUM_REQS * QUERY_LEN + 1, QUERY_LEN, dtype=torch.int32)
    positions = torch.arange(CONTEXT - QUERY_LEN, CONTEXT).repeat(NUM_REQS)
    made = tables.step(
        StepBatch(
            idx_mapping=np.arange(NUM_REQS, dtype=np.int32),
            query_start_loc=starts,
            positions=positions,
            num_reqs_padded=NUM_REQS,
            num_tokens_padded=len(positions),
        )
    )
    step = Step(
        made.block_tables,
        made.slot_mappings,
        torch.full((NUM_REQS,), CONTEXT, dtype=torch.int32, device=device),
        starts.to(device),
        torch.tensor([blocks] * NUM_REQS, dtype=torch.int32, device=device),
        tuple(counts.to(device) for counts in references),
    )
    return step, pools


def step_bytes(step: Step) -> int:
    """Bytes that a check reads and writes where nothing is staged: columns, slots, blocks held."""
    total = 0
    for group, table in enumerate(step.block_tables):
        live = int(step.num_blocks_of_row[:, group].sum())
        held = int((table != NULL_BLOCK).sum())
        tokens = step.slot_mappings.shape[1]
        total += live * ID_BYTES + held * (COUNT_BYTES + CLAIM_BYTES)
        total += tokens * (SLOT_BYTES + ID_BYTES)
    return total


def median_us(work: Callable[[], object], device: str, runs: int) -> float:
    """The median time of a call, the device's work included."""
    times = []
    for _ in range(runs):
        start = time.perf_counter_ns()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"{name}, {platform.system()}, Python {platform.python_version()}", end=", ")
    print(f"torch {torch.__version__}, 1 thread")
    layouts = plan()
    step, pools = decode_step(layouts, options.device)
    sanitizer = BlockTableSanitizer(layouts, pools, mode="report")
    sound = step.check(sanitizer)
    slot = step.slot_mappings[0, 5].clone()
    step.slot_mappings[0, 5] = step.slot_mappings[0, 900]
    planted = step.check(sanitizer)
    step.slot_mappings[0, 5] = slot
    if sound or (FaultKind.NEIGHBOUR_SLOT, 0) not in planted or step.check(sanitizer):
        raise SystemExit(f"no times: sound step {sound}, planted fault {planted}")
    whole = sum(table.numel() * ID_BYTES for table in step.block_tables)
    print(f"launches a checked step: {1 if options.device == 'cuda' else 0}")
    print(f"bytes a checked step: {step_bytes(step):,}; whole tables: {whole:,}")
    checked = median_us(lambda: step.check(sanitizer), options.device, options.runs)
    read = median_us(
        lambda: [table.count_nonzero() for table in step.block_tables],
        options.device,
        options.runs,
    )
    print(f"check: {checked:,.0f} us; reading the whole tables: {read:,.0f} us; medians")


if __name__ == "__main__":
    main()
