"""A step's plan as edits of the tables: what rows lost, then what they gained."""

from __future__ import annotations

from itertools import chain

import numpy as np

from bt_runner.scheduling.step_plan import StepPlan
from bt_tables import StagedBlockTables


def stage_plan(tables: StagedBlockTables, plan: StepPlan) -> None:
    """Stage all changes of rows since the last step; the next table update carries them out."""
    for row, group, num_blocks in plan.null_prefixes:
        tables.null_prefix(row, group, num_blocks)
    for row in plan.cleared_rows:
        tables.clear_row(row)
    grown = [part for part in plan.scheduled if any(part.new_block_ids)]
    if not grown:
        return
    counts = [[len(ids) for ids in part.new_block_ids] for part in grown]
    ids = chain.from_iterable(chain.from_iterable(part.new_block_ids) for part in grown)
    tables.stage(
        np.array([part.row for part in grown], dtype=np.int32),
        np.array(counts, dtype=np.int32),
        np.fromiter(ids, dtype=np.int32),
    )
