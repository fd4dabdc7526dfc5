"""Every fault that an engine has had is found in its step, with its kind and place."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.plans import serving_limits
from tests.support.planted import column_faults, owner_faults, shape_faults, slot_faults
from tests.support.planted.loop import Loop, MakeTables, Planted
from tests.support.small_engine import PlainTables, Tables
from tests.support.spoiled_steps import (
    HYBRID_POOLS,
    SHARING_POOLS,
    hybrid_layouts,
    sharing_layouts,
)
from tests.support.table_drivers import BatchTables, StagedTables

from bt_tables.sanitizer import FaultKind
from bt_width import AttentionSpec, BlockTableLayout

Config = tuple[Sequence[BlockTableLayout], Sequence[int]]


def plain_tables(layouts: Sequence[BlockTableLayout], num_blocks: Sequence[int]) -> Tables:
    return PlainTables(layouts)


def huge_layouts() -> Sequence[BlockTableLayout]:
    """Blocks so large that the slots of block 8 lie past 2^31."""
    limits = serving_limits(60, max_num_reqs=3, max_num_batched_tokens=16)
    return [BlockTableLayout.plan(AttentionSpec(block_size=2**28), limits)]


HYBRID: Config = (hybrid_layouts(), HYBRID_POOLS)
SHARED: Config = (sharing_layouts(), SHARING_POOLS)
TWO_RANKS: Config = (sharing_layouts(size=2, rank=1), SHARING_POOLS)
HUGE: Config = (huge_layouts(), [40])

FAULTS: list[tuple[Config, Callable[[Loop], Planted]]] = [
    (HYBRID, shape_faults.one_column_short),
    (HYBRID, shape_faults.guard_column),
    (HYBRID, shape_faults.rows_lost),
    (HYBRID, shape_faults.more_rows_than_planned),
    (HYBRID, shape_faults.transposed_table),
    (HYBRID, shape_faults.moved_storage),
    (HYBRID, shape_faults.narrow_slots),
    (HYBRID, shape_faults.too_many_slots),
    (HYBRID, shape_faults.falling_starts),
    (HYBRID, shape_faults.more_tokens_than_slots),
    (HYBRID, shape_faults.drafts_past_the_end),
    (HYBRID, shape_faults.length_of_the_wrong_half),
    (HYBRID, shape_faults.appended_to_a_full_row),
    (TWO_RANKS, shape_faults.state_row_divided_by_shards),
    (HYBRID, column_faults.stale_tail),
    (HYBRID, column_faults.dropped_append),
    (HYBRID, column_faults.dropped_replacement),
    (HYBRID, column_faults.table_of_capture_time),
    (HYBRID, column_faults.state_at_another_groups_block_size),
    (HYBRID, column_faults.no_block_for_a_draft_state),
    (HYBRID, column_faults.window_nulled_one_block_too_far),
    (HYBRID, column_faults.expanded_twice),
    (HYBRID, column_faults.block_ids_not_expanded),
    (HYBRID, column_faults.interleaved_rows),
    (HYBRID, column_faults.null_block_expanded),
    (HYBRID, column_faults.padding_row_of_minus_one),
    (HYBRID, column_faults.phantom_request),
    (HYBRID, column_faults.garbage_id),
    (HYBRID, column_faults.negative_id),
    (HYBRID, column_faults.rows_in_another_order),
    (HYBRID, column_faults.reused_host_buffer),
    (HYBRID, owner_faults.block_handed_out_twice),
    (HYBRID, owner_faults.written_past_a_row),
    (HYBRID, owner_faults.freed_too_early),
    (HYBRID, owner_faults.window_not_nulled),
    (SHARED, owner_faults.prefix_hit_rounded_up),
    (HYBRID, owner_faults.exchanged_states),
    (SHARED, owner_faults.exchanged_unwritten_columns),
    (HYBRID, owner_faults.rotated_rows),
    (HYBRID, slot_faults.map_of_another_layout),
    (HYBRID, slot_faults.next_rows_block),
    (HYBRID, slot_faults.stride_taken_for_width),
    (HYBRID, slot_faults.masked_load_of_zero),
    (HYBRID, slot_faults.ring_through_the_block_formula),
    (HYBRID, slot_faults.slots_not_padded),
    (HYBRID, slot_faults.slots_padded_with_zero),
    (HYBRID, slot_faults.slot_of_a_group_without_slots),
    (HYBRID, slot_faults.kernel_ids_times_the_block),
    (HYBRID, slot_faults.draft_over_a_draft),
    (TWO_RANKS, slot_faults.shards_of_a_replicated_group),
    (TWO_RANKS, slot_faults.another_ranks_token),
    (HUGE, slot_faults.slot_that_wraps),
]
CASES: list[Any] = [pytest.param(config, plant, id=plant.__name__) for config, plant in FAULTS]
TABLES = [
    pytest.param(StagedTables, id="staged"),
    pytest.param(BatchTables, id="batch-order"),
    pytest.param(plain_tables, id="plain-tensors"),
]


@pytest.mark.fast
@pytest.mark.parametrize("make_tables", TABLES)
@pytest.mark.parametrize(("config", "plant"), CASES)
def test_a_planted_fault_is_found_in_its_step(
    config: Config, plant: Callable[[Loop], Planted], make_tables: MakeTables
) -> None:
    loop = Loop(make_tables, *config)

    planted = plant(loop)
    report = loop.check(planted.step)

    assert any(planted.expected.is_met_by(finding) for finding in report.findings), report.text


def test_every_kind_of_fault_that_a_cpu_can_have_is_planted() -> None:
    found = set()
    for config, plant in FAULTS:
        loop = Loop(StagedTables, *config)
        found |= {plant(loop).expected.kind}

    assert set(FaultKind) - found == {FaultKind.DEVICE, FaultKind.UNSTABLE}


def test_the_page_lists_every_planted_fault_with_what_is_found() -> None:
    page = (Path(__file__).parents[3] / "docs" / "sanitizer.md").read_text(encoding="utf-8")
    table = page.partition("## Faults that engines have had")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    listed = {(cells[0], cells[-1].strip("`")) for cells in rows[2:]}

    planted = {
        (str(plant.__doc__).rstrip("."), plant(Loop(StagedTables, *config)).expected.kind.value)
        for config, plant in FAULTS
    }

    assert listed == planted


@pytest.mark.parametrize(
    ("config", "plant"),
    [
        (HYBRID, owner_faults.exchanged_states),
        (SHARED, owner_faults.exchanged_unwritten_columns),
        (HYBRID, owner_faults.rotated_rows),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_exchange_is_invisible_without_the_blocks_that_rows_were_given(
    config: Config, plant: Callable[[Loop], Planted]
) -> None:
    """And the report says that it was not looked for."""
    loop = Loop(StagedTables, *config)

    report = loop.check(plant(loop).step, with_refs=False)

    assert report.findings == ()
    assert "exchanged blocks" in report.checks_off


@pytest.mark.fast
@pytest.mark.parametrize("make_tables", TABLES)
@pytest.mark.parametrize("config", [HYBRID, SHARED, TWO_RANKS], ids=["hybrid", "shared", "ranks"])
def test_a_loop_without_a_fault_has_no_finding(config: Config, make_tables: MakeTables) -> None:
    loop = Loop(make_tables, *config, seed=11)
    for _ in range(60):
        loop.sound(loop.engine.step())

    assert loop.sanitizer.num_faults == 0
