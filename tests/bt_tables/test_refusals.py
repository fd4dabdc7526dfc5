"""What a refused call says: the numbers that were wrong, and the same as attributes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tables import batch_of, plan_groups

from bt_tables import StagedBlockTables, kernel_block_view, state_slots, write_states
from bt_width import AttentionSpec, BlockTableError, MambaSpec, ServingLimits

pytestmark = pytest.mark.fast

# 11 blocks of 8 tokens a row, in 22 columns of 4; then 6 blocks of 16
LIMITS = ServingLimits(max_model_len=88, max_num_reqs=6, max_num_batched_tokens=64)
LAYOUTS = plan_groups(
    LIMITS,
    (AttentionSpec(block_size=8, token_alignment=None), 4),
    AttentionSpec(block_size=16, token_alignment=None),
    MambaSpec(block_size=16, mode="align"),
)


def tables() -> StagedBlockTables:
    """Row 2 holds seven blocks, two and none."""
    found = StagedBlockTables(LAYOUTS, device="cpu", num_blocks=[100, 50, 20])
    found.append_block_ids(2, [range(1, 8), [1, 2], []])
    return found


def step(**parts: Any) -> Callable[[StagedBlockTables], object]:
    return lambda tables: tables.step(batch_of([0], [[1]])._replace(**parts))


def stage(counts: Any, num_ids: int) -> Callable[[StagedBlockTables], object]:
    return lambda tables: tables.stage(
        np.array([2, 3], np.int32), np.array(counts, np.int32), np.ones(num_ids, np.int32)
    )


def gather(lengths: list[int]) -> Callable[[StagedBlockTables], object]:
    def call(tables: StagedBlockTables) -> object:
        tables.step(batch_of([0, 2, 1]))
        return tables.gather_csr(0, np.array(lengths, np.int32), 3)

    return call


Call = Callable[[StagedBlockTables], object]
REFUSALS: list[tuple[Call, str, dict[str, object]]] = [
    (
        lambda tables: tables.append_block_ids(2, [[], [], [1] * 7]),
        "row 2 holds 0 blocks in group 2 and gets 7 more; a row holds at most 6: ",
        {"row": 2, "group": 2, "num_blocks": 7, "held": 0, "blocks_per_row": 6},
    ),
    (
        lambda tables: tables.append_block_ids(2, [[1] * 5, [], []]),
        "row 2 holds 7 blocks in group 0 and gets 5 more; a row holds at most 11: ",
        {"row": 2, "group": 0, "num_blocks": 5, "held": 7, "blocks_per_row": 11},
    ),
    (
        stage([[0, 0, 0], [0, 7, 0]], 7),
        "row 3 holds 0 blocks in group 1 and gets 7 more; a row holds at most 6: ",
        {"row": 3, "group": 1, "num_blocks": 7, "held": 0, "blocks_per_row": 6},
    ),
    (
        stage([[1, 0, 0], [1, 0, -2]], 0),
        "row 3 gets -2 blocks in group 2; that is not a count",
        {"row": 3, "group": 2, "num_blocks": -2},
    ),
    (
        stage([[1, 0, 0], [0, 1, 0]], 3),
        "counts add up to 2; there are 3 ids",
        {"counted": 2, "num_ids": 3},
    ),
    (
        stage([[1, 0], [0, 1]], 2),
        "counts must be [2, 3], not [2, 2]",
        {"shape": (2, 2)},
    ),
    (
        lambda tables: tables.append_block_ids(0, [[4], [50, 3], [-1]]),
        "row 0 gets block id 50 in group 1; it must lie in 0..49, the pool of that group",
        {"row": 0, "group": 1, "id": 50, "max_id": 49},
    ),
    (
        lambda tables: tables.append_block_ids(0, [[99], [49], [20]]),
        "row 0 gets block id 20 in group 2; it must lie in 0..19, the pool of that group",
        {"row": 0, "group": 2, "id": 20, "max_id": 19},
    ),
    (
        lambda tables: tables.append_block_ids(0, [[1], [2]]),
        "block_ids must have one sequence of ids a group, and not 2 for 3",
        {"num_sequences": 2, "num_groups": 3},
    ),
    (
        lambda tables: tables.append_block_ids(6, [[], [], []]),
        "row must be an int in 0..5, not 6",
        {"argument": "row", "value": 6, "low": 0, "high": 5},
    ),
    (
        lambda tables: tables.null_prefix(2, 3, 0),
        "group must be an int in 0..2, not 3",
        {"argument": "group", "value": 3, "low": 0, "high": 2},
    ),
    (
        lambda tables: tables.null_prefix(2, 1, 3),
        "cannot null 3 blocks of row 2 in group 1: it has 2",
        {"row": 2, "group": 1, "num_blocks": 3, "held": 2},
    ),
    (
        lambda tables: tables.step(batch_of([5, 8, 0, 9])),
        "idx_mapping[1] is 8; it must be a row in 0..5, or -1 for padding",
        {"request": 1, "row": 8, "max_row": 5},
    ),
    (
        lambda tables: tables.step(batch_of([0, -2, -3])),
        "idx_mapping[1] is -2; it must be a row in 0..5, or -1 for padding",
        {"request": 1, "row": -2, "max_row": 5},
    ),
    (
        lambda tables: tables.dummy_block_tables(52),
        "num_reqs must be an int in 0..6, not 52",
        {"argument": "num_reqs", "value": 52, "low": 0, "high": 6},
    ),
    (
        lambda tables: tables.dummy_slot_mappings(65),
        "num_tokens must be an int in 0..64, not 65",
        {"argument": "num_tokens", "value": 65, "low": 0, "high": 64},
    ),
    (
        step(num_reqs_padded=0),
        "num_reqs_padded must be an int in 1..6, not 0",
        {"argument": "num_reqs_padded", "value": 0, "low": 1, "high": 6},
    ),
    (
        step(query_start_loc=np.zeros(1, np.int32)),
        "query_start_loc must have 2 elements for 1 requests, not 1",
        {"num_requests": 1, "length": 1},
    ),
    (
        step(query_start_loc=np.array([0, 1, 1, 2], np.int32)),
        "query_start_loc has 4 elements for 1 requests; those behind the first 2 may only repeat "
        "the end, 1",
        {"num_requests": 1, "length": 4},
    ),
    (
        step(query_start_loc=np.array([0, 1], np.int32), num_tokens_padded=0),
        "num_tokens_padded is 0, which is less than the 1 tokens of the batch",
        {"num_tokens_padded": 0, "num_tokens": 1},
    ),
    (
        step(query_start_loc=np.array([0, 3], np.int32), num_tokens_padded=5),
        "1 positions for 3 tokens; give each token its position",
        {"num_positions": 1, "num_tokens": 3},
    ),
    (
        step(query_start_loc=np.zeros((2, 1), np.int32)),
        "query_start_loc must be 1-dimensional int32, not 2-dimensional int32",
        {"argument": "query_start_loc", "dtype": "int32", "dims": 2},
    ),
    (
        step(positions=np.zeros((1, 1), np.int64)),
        "positions must be 1-dimensional int64, not 2-dimensional int64",
        {"argument": "positions", "dtype": "int64", "dims": 2},
    ),
    (
        gather([0, 57, 90]),
        "seq_lens[1] is 57, but request 1 holds 7 blocks of 8 tokens in group 0, which is 56 "
        "tokens",
        {"request": 1, "group": 0, "seq_len": 57, "held": 7, "capacity": 56},
    ),
    (
        gather([0, -2, -3]),
        "seq_lens[1] is -2; it must be a count of tokens",
        {"request": 1, "seq_len": -2},
    ),
    (
        lambda tables: tables.gather_csr(0, np.array([8], np.int32), 3),
        "seq_lens has 1 lengths for 3 requests",
        {"num_lengths": 1, "num_reqs": 3},
    ),
    (
        lambda tables: tables.gather_csr(2, np.array([8], np.int32), 1),
        "a group of kind mamba has no blocks that follow one another",
        {"group": 2, "kind": "mamba"},
    ),
    (
        lambda tables: StagedBlockTables(LAYOUTS, device="cpu", num_blocks=[100, 50]),
        "num_blocks must be one pool size of at least 1 for each of 3 groups, not [100, 50]",
        {"num_blocks": [100, 50]},
    ),
    (
        lambda tables: StagedBlockTables(LAYOUTS, device="cpu", num_blocks=[100, 50, 20, 1]),
        "num_blocks must be one pool size of at least 1 for each of 3 groups, not [100, 50, 20, 1]",
        {"num_blocks": [100, 50, 20, 1]},
    ),
    (
        lambda tables: kernel_block_view(torch.zeros(3, 7, 2), LAYOUTS[0]),
        "the cache must hold 8 states a block in dimension 1, not (3, 7, 2)",
        {"shape": (3, 7, 2), "states_per_block": 8},
    ),
    (
        lambda tables: state_slots(torch.zeros(2).long(), torch.zeros(3).long(), 1),
        "slots and positions must be int64 vectors of one length, not torch.int64 of shape (3,)",
        {"dtype": "torch.int64", "shape": (3,)},
    ),
    (
        lambda tables: write_states(
            torch.zeros(3, 8, 2), torch.tensor([5, -1, 24]), torch.zeros(3, 2)
        ),
        "slots 5..24 leave the cache's 0..23",
        {"num_slots": 24},
    ),
]


@pytest.mark.parametrize(
    ("call", "message", "details"), REFUSALS, ids=[case[1] for case in REFUSALS]
)
def test_a_refusal_says_and_carries_the_numbers(
    call: Call, message: str, details: dict[str, object]
) -> None:
    with pytest.raises(BlockTableError, match=re.escape(message)) as caught:
        call(tables())

    assert caught.value.details == details
