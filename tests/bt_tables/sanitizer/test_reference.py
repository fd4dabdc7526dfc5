"""The reference against a naive checker that loops over tokens by the layout's functions."""

import random

import pytest
import torch
from tests.support.naive_sanitizer import Place, naive_faults
from tests.support.small_engine import SmallStep
from tests.support.spoiled_steps import (
    HYBRID_POOLS,
    SHARING_POOLS,
    hybrid_layouts,
    plain_engine,
    sharing_layouts,
    spoil,
)

from bt_tables.sanitizer import BlockTableSanitizer, FaultKind, SanitizerReport
from bt_width import BlockTableLayout

pytestmark = pytest.mark.fast

WRONG_SLOTS = {
    FaultKind.MISSING_SLOT,
    FaultKind.FOREIGN_TOKEN,
    FaultKind.NULL_SLOT,
    FaultKind.SLOT_OUT_OF_POOL,
    FaultKind.NEIGHBOUR_SLOT,
}
GROUPS = [
    pytest.param(hybrid_layouts(), HYBRID_POOLS, id="hybrid"),
    pytest.param(sharing_layouts(), SHARING_POOLS, id="sharing"),
    pytest.param(sharing_layouts(size=3, rank=0), SHARING_POOLS, id="first-rank-of-three"),
    pytest.param(sharing_layouts(size=3, rank=2), SHARING_POOLS, id="last-rank-of-three"),
]


def check(
    layouts: list[BlockTableLayout], pools: list[int], step: SmallStep, *, with_refs: bool
) -> SanitizerReport:
    sanitizer = BlockTableSanitizer(layouts, pools, mode="report", max_findings=100_000)
    return sanitizer.check(
        step.block_tables,
        step.slot_mappings,
        step.seq_lens,
        step.query_start_loc,
        num_blocks_of_row=step.num_blocks_of_row,
        ref_counts=step.ref_counts if with_refs else None,
        ref_blocks=step.ref_blocks if with_refs else None,
    )


def places(report: SanitizerReport) -> list[Place]:
    return [
        Place(
            FaultKind.WRONG_SLOT if finding.kind in WRONG_SLOTS else finding.kind,
            finding.group,
            finding.row,
            finding.column if finding.token is None else None,
            finding.token,
        )
        for finding in report.findings
    ]


@pytest.mark.parametrize("with_refs", [True, False], ids=["counts", "no-counts"])
@pytest.mark.parametrize(("layouts", "pools"), GROUPS)
@pytest.mark.parametrize("seed", range(3))
def test_the_reference_finds_what_loops_find(
    layouts: list[BlockTableLayout], pools: list[int], seed: int, with_refs: bool
) -> None:
    engine, draw = plain_engine(layouts, pools, seed), random.Random(seed)
    for _ in range(12):
        step = spoil(engine.step(), draw)

        found = places(check(layouts, pools, step, with_refs=with_refs))

        expected = naive_faults(layouts, pools, step, with_refs=with_refs)
        assert sorted(found, key=repr) == sorted(expected, key=repr)


@pytest.mark.parametrize("with_refs", [True, False], ids=["counts", "no-counts"])
@pytest.mark.parametrize(("layouts", "pools"), GROUPS)
def test_a_sound_step_has_no_fault(
    layouts: list[BlockTableLayout], pools: list[int], with_refs: bool
) -> None:
    engine = plain_engine(layouts, pools, seed=7)
    for _ in range(20):
        report = check(layouts, pools, engine.step(), with_refs=with_refs)

        assert report.findings == ()


def test_random_damage_is_found_more_often_than_not() -> None:
    """The comparison above is not one of empty sets."""
    layouts, draw = hybrid_layouts(), random.Random(1)
    engine = plain_engine(layouts, HYBRID_POOLS, seed=1)
    reports = [
        check(layouts, HYBRID_POOLS, spoil(engine.step(), draw), with_refs=True) for _ in range(40)
    ]

    kinds = {finding.kind for report in reports for finding in report.findings}

    assert sum(report.num_faults > 0 for report in reports) > 20
    assert len(kinds) > 8


def test_nothing_is_written_to_what_is_checked() -> None:
    layouts = hybrid_layouts()
    step = plain_engine(layouts, HYBRID_POOLS, seed=3).step()
    before = [table.clone() for table in (*step.block_tables, step.slot_mappings)]

    check(layouts, HYBRID_POOLS, step, with_refs=True)

    after = [*step.block_tables, step.slot_mappings]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
