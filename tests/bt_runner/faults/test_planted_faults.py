"""A fault that is planted into the running engine is found in its step, before a layer reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.bt_runner.harness import (
    SpoiledDrafter,
    decode_all_densely,
    greedy_traffic,
    tiny_engine,
    tiny_limits,
    tiny_options,
)
from tests.support.planted import column_faults, shape_faults, slot_faults
from tests.support.planted.engine_loop import planting
from tests.support.planted.loop import Loop, Planted

from bt_runner.engine import Engine
from bt_runner.recorder import Recorder
from bt_tables import StagedBlockTables
from bt_tables.sanitizer import BlockTableFaultError, FaultKind

NUM_DRAFTS = 1
FAULTS: list[Callable[[Loop], Planted]] = [
    shape_faults.one_column_short,
    shape_faults.guard_column,
    shape_faults.rows_lost,
    shape_faults.more_rows_than_planned,
    shape_faults.transposed_table,
    shape_faults.moved_storage,
    shape_faults.narrow_slots,
    shape_faults.too_many_slots,
    shape_faults.falling_starts,
    shape_faults.more_tokens_than_slots,
    shape_faults.drafts_past_the_end,
    shape_faults.length_of_the_wrong_half,
    shape_faults.appended_to_a_full_row,
    column_faults.stale_tail,
    column_faults.table_of_capture_time,
    column_faults.state_at_another_groups_block_size,
    column_faults.no_block_for_a_draft_state,
    column_faults.expanded_twice,
    column_faults.block_ids_not_expanded,
    column_faults.interleaved_rows,
    column_faults.null_block_expanded,
    column_faults.garbage_id,
    column_faults.reused_host_buffer,
    column_faults.rows_in_another_order,
    slot_faults.map_of_another_layout,
    slot_faults.stride_taken_for_width,
    slot_faults.masked_load_of_zero,
    slot_faults.slots_not_padded,
    slot_faults.slot_of_a_group_without_slots,
    slot_faults.kernel_ids_times_the_block,
    slot_faults.draft_over_a_draft,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_in_its_step(plant: Callable[[Loop], Planted]) -> None:
    """Nothing of that step is computed; the requests start over and get the right tokens."""
    traffic = greedy_traffic(2, (30, 41, 17, 23, 9), max_new_tokens=14)
    wanted = decode_all_densely(traffic)
    engine = tiny_engine(
        tiny_limits(num_speculative_tokens=NUM_DRAFTS),
        tiny_options(
            attention_block_size=16, mamba_mode="align", num_speculative_blocks=NUM_DRAFTS
        ),
        drafter=SpoiledDrafter(traffic, wanted, 0.7),
        batch_sizes=(4,),
    )
    recorder = Recorder()
    engine.observe(recorder)
    pairs = zip(traffic.prompts, traffic.params, strict=True)
    requests = [engine.add_request(prompt, params) for prompt, params in pairs]

    with planting(engine, plant) as planted, pytest.raises(BlockTableFaultError) as caught:
        _finish(engine)
    computed = [each.step for of in recorder.observations.values() for each in of]
    assert engine.num_steps not in computed
    report = caught.value.report
    assert any(planted[0].expected.is_met_by(finding) for finding in report.findings), report.text
    _finish(engine)

    assert [request.output for request in requests] == wanted


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def _dropped_append(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """A row that gained a block on the host was not marked for the device."""
    patch.setattr(StagedBlockTables, "stage", lambda *_args, **_kwargs: None)


def _handed_out_twice(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """The allocator's free list holds a block that is in use."""
    pool = engine.pools[0]
    used = pool.references.nonzero()[0][:1].astype(np.int32)
    references = pool.references.copy()
    pool.release(used, last_step=engine.num_steps)
    pool.complete(engine.num_steps)
    # the next to be given: the others are taken away
    pool._references[:] = references
    given = pool.allocate(pool.num_free - 1)
    pool._references[given] = 0


def _freed_too_early(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """A block went back to the pool while a step still uses it."""
    pool = engine.pools[1]
    used = pool.references.nonzero()[0][:1].astype(np.int32)
    pool.release(used, last_step=engine.num_steps)


CAUSES = [
    (_dropped_append, FaultKind.NULL_BLOCK),
    (_handed_out_twice, FaultKind.DUPLICATE_BLOCK),
    (_freed_too_early, FaultKind.FREED_BLOCK),
]


@pytest.mark.parametrize(
    ("cause", "kind"),
    [pytest.param(cause, kind, id=cause.__name__.strip("_")) for cause, kind in CAUSES],
)
def test_a_broken_part_is_found_in_the_step_that_meets_it(
    cause: Callable[[Engine, pytest.MonkeyPatch], None], kind: FaultKind
) -> None:
    """Here the part itself is at fault; a pool at fault is set right when requests start over."""
    traffic = greedy_traffic(2, (12, 9), max_new_tokens=14)
    engine = tiny_engine()
    pairs = zip(traffic.prompts, traffic.params, strict=True)
    requests = [engine.add_request(prompt, params) for prompt, params in pairs]
    for _ in range(3):
        engine.step()

    with pytest.MonkeyPatch.context() as patch:
        cause(engine, patch)
        with pytest.raises(BlockTableFaultError) as caught:
            _finish(engine)
    assert kind in {finding.kind for finding in caught.value.report.findings}
    _finish(engine)

    assert [request.output for request in requests] == decode_all_densely(traffic)


def test_the_page_says_which_faults_are_planted_here_too() -> None:
    page = (Path(__file__).parents[3] / "docs" / "sanitizer.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    marked = {cells[0] for cells in rows[2:] if cells[2] == "engine"}

    planted = FAULTS + [cause for cause, _ in CAUSES]
    assert marked == {str(plant.__doc__).rstrip(".") for plant in planted}
