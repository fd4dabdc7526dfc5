"""What a finding says of a fault in a step of three requests, number by number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.support.plans import serving_limits

from bt_tables.sanitizer import BlockTableSanitizer, FaultKind, Finding
from bt_width import PAD_SLOT, AttentionSpec, BlockTableLayout, InvalidSpecError

pytestmark = pytest.mark.fast

# 8 blocks of 8 tokens a row, in 16 columns of 4
LAYOUT = BlockTableLayout.plan(
    AttentionSpec(block_size=8, token_alignment=None),
    serving_limits(64, max_num_reqs=5, max_num_batched_tokens=8),
    4,
)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Step:
    """One token each of requests of 9, 5 and 17 tokens, and two padding rows."""

    blocks: list[list[int]] = field(default_factory=lambda: [[2, 3], [4], [5, 6, 7], [], []])
    slots: list[int] = field(default_factory=lambda: [24, 36, 56, PAD_SLOT, PAD_SLOT])
    lengths: list[int] = field(default_factory=lambda: [9, 5, 17])
    starts: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    counts: list[int] = field(default_factory=lambda: [2, 1, 3])
    references: dict[int, int] = field(default_factory=dict)

    def findings(self) -> set[Finding]:
        table = torch.zeros(len(self.blocks), LAYOUT.width, dtype=torch.int32)
        for row, blocks in enumerate(self.blocks):
            ids = LAYOUT.expand(blocks)
            table[row, : len(ids)] = int32(*ids)
        references = torch.zeros(20, dtype=torch.int32)
        references[2:8] = 1
        for block, count in self.references.items():
            references[block] = count
        report = BlockTableSanitizer([LAYOUT], [20], mode="report").check(
            [table],
            torch.tensor([self.slots]),
            int32(*self.lengths),
            int32(*self.starts),
            num_blocks_of_row=int32(*self.counts)[:, None],
            ref_counts=[references],
        )
        assert report.num_faults == len(report.findings)
        return set(report.findings)


def finding(kind: FaultKind, row: int, **details: int) -> Finding:
    place: dict[str, Any] = {"request": row, **details}
    return Finding(kind=kind, group=0, row=row, **place)


def test_the_step_is_sound() -> None:
    assert Step().findings() == set()


def test_each_holder_past_the_count_of_a_block_is_named_with_the_first() -> None:
    step = Step(blocks=[[2, 3], [2], [2, 6, 7], [], []], slots=[24, 20, 56, PAD_SLOT, PAD_SLOT])

    assert step.findings() == {
        finding(FaultKind.DUPLICATE_BLOCK, row, column=0, value=4, other_owner=0) for row in (1, 2)
    }


def test_a_shared_block_is_written_by_rows_that_each_name_the_first_holder() -> None:
    step = Step(
        blocks=[[2, 3], [3], [5, 6, 7], [], []],
        slots=[24, 28, 56, PAD_SLOT, PAD_SLOT],
        references={3: 2},
    )

    assert step.findings() == {
        finding(FaultKind.SHARED_WRITE, 0, column=2, value=6),
        finding(FaultKind.SHARED_WRITE, 1, column=0, value=6, other_owner=0),
    }


def test_a_freed_block_is_named_by_its_kernel_block() -> None:
    step = Step(references={6: 0})

    assert step.findings() == {finding(FaultKind.FREED_BLOCK, 2, column=2, value=12)}


@pytest.mark.parametrize("row", [3, 4])
def test_a_padding_row_is_no_request(row: int) -> None:
    step = Step()
    step.blocks[row] = [9]

    found = step.findings()

    assert {(each.row, each.request) for each in found} == {(row, None)}
    assert {each.value for each in found} == {18, 19}


def test_a_negative_count_of_a_request_without_tokens_is_one_fault() -> None:
    step = Step(
        blocks=[[2, 3], [], [5, 6, 7], [], []],
        slots=[24, 56, PAD_SLOT, PAD_SLOT, PAD_SLOT],
        lengths=[9, 0, 17],
        starts=[0, 1, 1, 2],
        counts=[2, -5, 3],
    )

    assert step.findings() == {finding(FaultKind.BLOCK_COUNT, 1, value=-5, expected=0)}


def test_a_row_with_too_few_blocks_says_how_many_it_needs() -> None:
    step = Step(blocks=[[2, 3], [4], [5, 6], [], []], counts=[2, 1, 2])

    found = step.findings()

    assert finding(FaultKind.TOO_FEW_BLOCKS, 2, column=4, value=2, expected=3) in found


def test_a_slot_in_anothers_block_names_the_holder_and_the_first_writer() -> None:
    step = Step(slots=[24, 24, 56, PAD_SLOT, PAD_SLOT])

    place = {"column": 1, "token": 1, "value": 24, "other_owner": 0}
    assert step.findings() == {
        finding(FaultKind.NEIGHBOUR_SLOT, 1, **place, expected=36),
        finding(FaultKind.SLOT_TWICE, 1, **place),
    }


def test_a_request_that_writes_a_slot_twice_has_no_other_owner() -> None:
    step = Step(
        slots=[16, 16, 36, 56, PAD_SLOT], lengths=[2, 5, 17], starts=[0, 2, 3, 4], counts=[1, 1, 3]
    )
    step.blocks[0] = [2]

    assert step.findings() == {
        finding(FaultKind.WRONG_SLOT, 0, column=0, token=1, value=16, expected=17),
        finding(FaultKind.SLOT_TWICE, 0, column=0, token=1, value=16),
    }


def test_garbage_that_is_written_twice_is_found_twice() -> None:
    step = Step(slots=[-7, -7, 56, PAD_SLOT, PAD_SLOT])

    found = step.findings()

    twice = finding(FaultKind.SLOT_TWICE, 1, column=1, token=1, value=-7, other_owner=0)
    assert twice in found
    assert [each.kind for each in found].count(FaultKind.SLOT_OUT_OF_POOL) == 2


def test_a_later_requests_block_is_a_neighbours_too() -> None:
    step = Step(slots=[40, 36, 56, PAD_SLOT, PAD_SLOT])

    assert step.findings() == {
        finding(
            FaultKind.NEIGHBOUR_SLOT, 0, column=2, token=0, value=40, expected=24, other_owner=2
        )
    }


@pytest.mark.parametrize("block", [1, 19], ids=["below-all", "above-all"])
def test_a_slot_in_a_free_block_has_no_other_owner(block: int) -> None:
    step = Step(slots=[24, 8 * block, 56, PAD_SLOT, PAD_SLOT])

    assert step.findings() == {
        finding(FaultKind.WRONG_SLOT, 1, column=1, token=1, value=8 * block, expected=36)
    }


def test_a_slot_past_the_pool_is_out_of_it_by_one() -> None:
    step = Step(slots=[24, 160, 56, PAD_SLOT, PAD_SLOT])

    assert step.findings() == {
        finding(FaultKind.SLOT_OUT_OF_POOL, 1, column=1, token=1, value=160, expected=36)
    }


def test_a_pool_may_be_as_large_as_its_ids() -> None:
    largest = LAYOUT.max_block_id + 1

    BlockTableSanitizer([LAYOUT], [largest])

    with pytest.raises(InvalidSpecError, match=f"a pool of {largest + 1} blocks has ids past"):
        BlockTableSanitizer([LAYOUT], [largest + 1])
