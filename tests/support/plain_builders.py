"""What builders must say, token by token and state by state, from the pure contract alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from tests.support.batches import Request, rows_of

from bt_builders import DSADecodeMetadata
from bt_width import PAD_SLOT, BlockTableLayout

Pair = tuple[int, int, int]
"""A token of the step, its request, and a position (of a state's last token) that it sees."""


def tokens_of(requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    """Each token's request and position, in the order of the batch."""
    for index, request in enumerate(requests):
        for position in range(request.num_computed, request.seq_len):
            yield index, position


def state_addresses(
    layout: BlockTableLayout, requests: Sequence[Request], tokens_per_state: int = 1
) -> dict[int, tuple[int, int]]:
    """Which request and which position the states in this rank's cache belong to."""
    found: dict[int, tuple[int, int]] = {}
    for index, (request, row) in enumerate(zip(requests, rows_of(layout, requests), strict=True)):
        for position in range(tokens_per_state - 1, request.seq_len, tokens_per_state):
            slot = layout.slot(position, row)
            if slot != PAD_SLOT:
                assert slot // tokens_per_state not in found
                found[slot // tokens_per_state] = index, position
    return found


def expected_pairs(
    layout: BlockTableLayout, requests: Sequence[Request], tokens_per_state: int = 1
) -> set[Pair]:
    """What each token of a step sees on this rank."""
    states = sorted(state_addresses(layout, requests, tokens_per_state).values())
    return {
        (token, request, seen)
        for token, (request, position) in enumerate(tokens_of(requests))
        for owner, seen in states
        if owner == request and seen <= position
    }


def selected_pairs(
    decode: DSADecodeMetadata, addresses: dict[int, tuple[int, int]], states_per_column: int
) -> set[Pair]:
    """What the lengths and rows of a decode make a kernel read, token by token."""
    pairs: set[Pair] = set()
    table, lens = decode.block_table.tolist(), decode.seq_lens.tolist()
    for row, (ids, row_lens) in enumerate(zip(table, lens, strict=True)):
        for place, length in enumerate(row_lens):
            for state in range(length):
                column, offset = divmod(state, states_per_column)
                owner, position = addresses[ids[column] * states_per_column + offset]
                pairs.add((row * decode.query_len + place, owner, position))
    return pairs


def random_decodes(
    draw: random.Random, layout: BlockTableLayout, query_lens: Sequence[int]
) -> list[Request]:
    """Decoding requests of random lengths with blocks in random order."""
    longest = layout.limits.max_model_len
    lens = [draw.randint(query_len, longest) for query_len in query_lens]
    counts = [layout.num_blocks(length) for length in lens]
    pool = draw.sample(range(1, 2 * sum(counts) + 2), sum(counts))
    requests = []
    for length, query_len, count in zip(lens, query_lens, counts, strict=True):
        own, pool = tuple(pool[:count]), pool[count:]
        requests.append(Request(length, query_len, own))
    return requests


def int32(values: Sequence[int]) -> torch.Tensor:
    """A one-dimensional int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)
