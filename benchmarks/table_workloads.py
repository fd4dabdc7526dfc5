"""The steps that the table benchmarks run: steady decode, every row grows, a long prompt.

Each workload is a list of turns; a turn says what is staged before one step. The same
turns drive our tables, the baseline and the check that both hold the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from bt_tables import StepBatch
from bt_width import AttentionSpec, BlockTableLayout, ServingLimits

IntArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

REQUESTS = 256
GROUPS = 3
BLOCK_SIZE = 64
PROMPT_BLOCKS = 1500
START_BLOCKS = 16


@dataclass(frozen=True)
class Turn:
    """What one step brings.

    Attributes:
        rows: Rows that change, [M] int32.
        counts: Ids of each row and group, [M, G] int32.
        ids: Flat int32: row by row, within a row group by group.
        overwrite: Whether the ids replace what the rows hold.
        swaps: Pairs of rows that change places in the batch.
    """

    rows: IntArray
    counts: IntArray
    ids: IntArray
    overwrite: bool = False
    swaps: tuple[tuple[int, int], ...] = ()

    def lists(self) -> list[tuple[int, list[list[int]]]]:
        """The same as Python lists: each row with its ids, group by group."""
        ends = self.counts.reshape(-1).cumsum().reshape(self.counts.shape)
        return [
            (
                int(row),
                [
                    self.ids[end - count : end].tolist()
                    for count, end in zip(counts, row_ends, strict=True)
                ],
            )
            for row, counts, row_ends in zip(self.rows, self.counts, ends, strict=True)
        ]


def layouts(width: int) -> list[BlockTableLayout]:
    """Three groups of ``width`` columns."""
    limits = ServingLimits(
        max_model_len=width * BLOCK_SIZE, max_num_reqs=REQUESTS, max_num_batched_tokens=8192
    )
    return [BlockTableLayout.plan(AttentionSpec(block_size=BLOCK_SIZE), limits)] * GROUPS


def decode_batch() -> StepBatch:
    """Every request, one token each."""
    return StepBatch(
        idx_mapping=np.arange(REQUESTS, dtype=np.int32),
        query_start_loc=np.arange(REQUESTS + 1, dtype=np.int32),
        positions=np.full(REQUESTS, START_BLOCKS * BLOCK_SIZE - 1),
        num_reqs_padded=REQUESTS,
        num_tokens_padded=REQUESTS,
    )


def _turn(rows: IntArray, blocks: int, *, overwrite: bool = False) -> Turn:
    counts = np.full((len(rows), GROUPS), blocks, np.int32)
    ids = (np.arange(counts.sum()) * 7919 % 1_000_003 + 1).astype(np.int32)
    return Turn(rows.astype(np.int32), counts, ids, overwrite)


def start() -> Turn:
    """Every row gets its first blocks; replaces what it held."""
    return _turn(np.arange(REQUESTS), START_BLOCKS, overwrite=True)


def steady(step: int) -> Turn:
    """Each request gains a block every ``BLOCK_SIZE`` steps."""
    per_step = REQUESTS // BLOCK_SIZE
    return _turn(np.arange(per_step) + step % BLOCK_SIZE * per_step, 1)


def burst(step: int) -> Turn:
    """Every row of every group gains a block."""
    del step
    return _turn(np.arange(REQUESTS), 1)


def prompt(step: int) -> Turn:
    """One request is replaced by one with a prompt of 96,000 tokens."""
    return _turn(np.array([step % REQUESTS]), PROMPT_BLOCKS, overwrite=True)


WORKLOADS: dict[str, Callable[[int], Turn]] = {"steady": steady, "burst": burst, "prompt": prompt}


def swaps(step: int) -> Turn:
    """Sixteen pairs of rows change places."""
    pairs = tuple(
        ((step + 2 * pair) % REQUESTS, (step + 2 * pair + 1) % REQUESTS) for pair in range(16)
    )
    return replace(_turn(np.empty(0, np.int32), 0), swaps=pairs)


SWAPS: dict[str, Callable[[int], Turn]] = {"16 swaps": swaps}


class WholeRows:
    """The baseline: rows on the host, and every row of every group copied each step.

    The device may read late and the rows change at once, so they go to a packet first, as
    ours do: one copy within the host, and one to the device.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        """Start with empty rows on both sides."""
        self._rows = [np.zeros((REQUESTS, width), np.int32) for width in widths]
        self._held = np.zeros((REQUESTS, len(widths)), np.int64)
        self._host = [torch.from_numpy(rows) for rows in self._rows]
        self._packets = [torch.zeros_like(host) for host in self._host]
        self.tables = [torch.zeros_like(host) for host in self._host]

    def step(self, turn: Turn) -> None:
        """Write the new ids into the host's rows, and copy all of them."""
        at = 0
        for row, counts in zip(turn.rows.tolist(), turn.counts.tolist(), strict=True):
            for group, count in enumerate(counts):
                start = 0 if turn.overwrite else int(self._held[row, group])
                if turn.overwrite:
                    self._rows[group][row, count:] = 0
                self._rows[group][row, start : start + count] = turn.ids[at : at + count]
                self._held[row, group] = start + count
                at += count
        for table, packet, host in zip(self.tables, self._packets, self._host, strict=True):
            packet.copy_(host)
            table.copy_(packet)
