"""A planted fault is found in its step, and request, group and column are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.model_configs import nemotron_h_8b
from tests.support.replays import CutOptions, ReplayCase, drive, glm_case, own_trace, share_too_much

from bt_runner.arrays import Ints
from bt_runner.errors import VerificationError
from bt_runner.kv_cache_manager import GroupBlocks
from bt_runner.replay.loop import Replay
from bt_tables import StagedBlockTables, StepBatch, StepTables

FAULTY_CALL = 12


class DropsARow(StagedBlockTables):
    """Forgets the last row of one staging."""

    calls = 0

    def stage(self, rows: Any, counts: Any, ids: Any, *, overwrite: bool = False) -> None:
        self.calls += 1
        if self.calls == FAULTY_CALL:
            dropped = int(counts[-1].sum())
            rows, counts, ids = rows[:-1], counts[:-1], ids[: len(ids) - dropped]
        super().stage(rows, counts, ids, overwrite=overwrite)


class MissesAClear(StagedBlockTables):
    """Leaves a request's blocks in its row when it ends."""

    calls = 0

    def clear_row(self, row: int) -> None:
        self.calls += 1
        if self.calls != 3:
            super().clear_row(row)


class SwapsTwoBlocks(StagedBlockTables):
    """Stages the blocks of a request in another order."""

    calls = 0

    def stage(self, rows: Any, counts: Any, ids: Any, *, overwrite: bool = False) -> None:
        self.calls += 1
        if self.calls == 1:
            ids = np.array(ids)
            ids[[0, 1]] = ids[[1, 0]]
        super().stage(rows, counts, ids, overwrite=overwrite)


class LeavesPadding(StagedBlockTables):
    """Leaves an id in a row above the batch."""

    def step(self, batch: StepBatch) -> StepTables:
        tables = super().step(batch)
        num_reqs = int((np.asarray(batch.idx_mapping) >= 0).sum())
        if 0 < num_reqs < batch.num_reqs_padded:
            tables.block_tables[0][-1, 5] = 7
        return tables


def _first_difference(replay: Replay) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        drive(replay, own_trace())
    return caught.value


@pytest.mark.parametrize(
    "tables_class",
    [
        pytest.param(DropsARow, id="a-dropped-row"),
        pytest.param(MissesAClear, id="a-missing-clear"),
        pytest.param(SwapsTwoBlocks, id="two-blocks-swapped"),
    ],
)
def test_a_fault_in_a_row_is_found_and_placed(tables_class: type[StagedBlockTables]) -> None:
    error = _first_difference(glm_case().make(own_trace(), tables_class))

    details = error.details
    assert details["group"] == "mla"
    assert details["expected"] != details["found"]
    assert f"column {details['column']} of request {details['request']}" in str(error)


def test_a_missing_clear_is_found_in_the_rows_next_request() -> None:
    trace = own_trace()
    error = _first_difference(glm_case().make(trace, MissesAClear))

    assert error.details["column"] == 0
    # the first eight lines had rows that were not held before
    assert int(str(error.details["request"]).removeprefix("line ")) > 8


def test_slots_of_another_shard_are_found_and_placed() -> None:
    error = _first_difference(glm_case().make(own_trace(), tables_rank=1))

    assert (error.details["group"], error.details["request"], error.details["column"]) == (
        "mla",
        "line 1",
        0,
    )
    assert "slot of position 0" in str(error)


def test_an_id_above_the_batch_is_found() -> None:
    error = _first_difference(glm_case().make(own_trace(), LeavesPadding))

    assert "padding" in str(error)
    assert (error.details["expected"], error.details["found"]) == (0, 7)


def test_a_write_to_a_shared_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    share_too_much(monkeypatch)

    error = _first_difference(glm_case().make(own_trace()))

    assert "shared" in str(error)
    assert error.details["request"]


@pytest.mark.usefixtures("loses_blocks")
def test_a_block_that_never_comes_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = GroupBlocks.release

    def release_all_but_one(group: GroupBlocks, rows: Ints, last_step: int) -> None:
        if group.layout.kind == "mamba":
            group.held[rows] -= 1
        release(group, rows, last_step)

    monkeypatch.setattr(GroupBlocks, "release", release_all_but_one)
    case = ReplayCase(
        config=nemotron_h_8b(), options=CutOptions(), num_drafts=0, size=1, max_model_len=8192
    )

    error = _first_difference(case.make(own_trace()))

    assert error.details["group"] == "mamba"
    assert "blocks in use" in str(error)


def test_a_fault_between_two_checks_is_found_at_the_next() -> None:
    """A wrong row stays wrong, so looking seldom finds it late, not never."""
    case = ReplayCase(config=glm_case().config, verify_every=10)
    replay = case.make(own_trace(), DropsARow)

    _first_difference(replay)

    assert replay.summary.num_steps % 10 == 1
    assert replay.summary.num_steps > FAULTY_CALL
