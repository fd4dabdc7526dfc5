"""Promise 7: a step costs what changed and its tokens, whatever the context and the width."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from tests.support.executors import CheckedExecutor, Counts
from tests.support.tables import batch_of, plan_groups

from bt_builders import (
    AttentionBackend,
    AttentionBatch,
    AttentionGroup,
    CommonAttentionMetadata,
    DSAIndexerMetadataBuilder,
    MambaMetadataBuilder,
    MLAMetadataBuilder,
    init_attention,
)
from bt_builders.protocol import BuilderClass
from bt_tables import MultiGroupBlockTable, StagedBlockTables, StepBatch
from bt_tables._rows import MAX_COLUMN_PROGRAMS
from bt_width import AttentionSpec, CacheSpec, MambaSpec, ServingLimits

REQUESTS = 256
STEADY_ROWS = 4


def tables_of_width(width: int) -> tuple[StagedBlockTables, CheckedExecutor]:
    limits = ServingLimits(
        max_model_len=64 * width, max_num_reqs=REQUESTS, max_num_batched_tokens=8192
    )
    executor = CheckedExecutor()
    spec = AttentionSpec(block_size=64)
    return StagedBlockTables(plan_groups(limits, spec, spec, spec), device=executor), executor


def decode_batch() -> StepBatch:
    return batch_of(range(REQUESTS), [[1000]] * REQUESTS)


def stage(
    tables: StagedBlockTables, num_rows: int, blocks: int, *, overwrite: bool = False
) -> None:
    counts = np.full((num_rows, 3), blocks, np.int32)
    ids = np.arange(1, 1 + counts.sum(), dtype=np.int32)
    tables.stage(np.arange(num_rows, dtype=np.int32), counts, ids, overwrite=overwrite)


def cost_of(executor: CheckedExecutor, tables: StagedBlockTables, batch: StepBatch) -> Counts:
    executor.counts = Counts()
    tables.step(batch)
    return replace(executor.counts)


@pytest.mark.fast
@pytest.mark.parametrize("width", [2048, 16_384])
def test_a_step_is_one_copy_and_one_launch(width: int) -> None:
    tables, executor = tables_of_width(width)
    batch = decode_batch()
    stage(tables, REQUESTS, 16)

    first = cost_of(executor, tables, batch)
    stage(tables, STEADY_ROWS, 1)
    steady = cost_of(executor, tables, batch)
    idle = cost_of(executor, tables, batch)

    for counts in (first, steady, idle):
        assert (counts.copies, counts.launches) == (1, 1)
    assert steady.bytes_sent <= 8192
    # one column in the row and one in the batch row that mirrors it
    assert steady.elements_written == STEADY_ROWS * 3 * 2
    assert idle.elements_written == 0
    assert idle.programs == 2 * 3
    assert steady.programs == 2 * 3 + STEADY_ROWS * 3


@pytest.mark.fast
def test_the_width_changes_nothing_of_a_step() -> None:
    def costs(width: int) -> list[Counts]:
        tables, executor = tables_of_width(width)
        batch = decode_batch()
        stage(tables, REQUESTS, 16)
        found = [cost_of(executor, tables, batch)]
        for num_rows, blocks in ((STEADY_ROWS, 1), (REQUESTS, 1), (1, 1500), (0, 0)):
            stage(tables, num_rows, blocks, overwrite=blocks > 1)
            found.append(cost_of(executor, tables, batch))
        return found

    assert costs(2048) == costs(16_384)


def test_a_long_context_costs_no_more_than_a_short_one() -> None:
    found = []
    for blocks in (3, 1500):
        tables, executor = tables_of_width(2048)
        stage(tables, REQUESTS, blocks)
        cost_of(executor, tables, decode_batch())
        stage(tables, STEADY_ROWS, 1)
        found.append(cost_of(executor, tables, decode_batch()))

    assert found[0] == found[1]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kernel_block_size", "blocks", "programs"),
    [
        pytest.param(64, 512, 1, id="one-tile"),
        pytest.param(64, 513, 2, id="one-past-a-tile"),
        pytest.param(16, 128, 1, id="one-tile-after-expansion"),
        pytest.param(16, 257, 3, id="past-two-tiles-after-expansion"),
    ],
)
def test_a_long_edit_is_shared_by_a_program_for_every_tile(
    kernel_block_size: int, blocks: int, programs: int
) -> None:
    limits = ServingLimits(max_model_len=64 * 2048, max_num_reqs=4, max_num_batched_tokens=4)
    executor = CheckedExecutor()
    layouts = plan_groups(limits, (AttentionSpec(block_size=64), kernel_block_size))
    tables = StagedBlockTables(layouts, device=executor)

    tables.append_block_ids(0, [range(1, 1 + blocks)])
    tables.apply_staged_writes()

    assert executor.counts.programs == programs


@pytest.mark.fast
def test_edits_of_many_long_rows_share_a_bounded_number_of_programs() -> None:
    limits = ServingLimits(max_model_len=2**20, max_num_reqs=600, max_num_batched_tokens=600)
    executor = CheckedExecutor()
    spec = AttentionSpec(block_size=64)
    tables = StagedBlockTables(plan_groups(limits, spec, spec), device=executor)

    tables.append_block_ids(0, [range(1, 2**14 + 1), [1]])
    for row in range(1, 600):
        tables.append_block_ids(row, [[7], [7]])
    tables.apply_staged_writes()

    pieces = 600 * 2
    assert executor.counts.programs == pieces * (MAX_COLUMN_PROGRAMS // pieces)


@pytest.mark.fast
@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_a_step_of_ordinary_size_allocates_nothing(num_groups: int) -> None:
    """An edit of every row, a token of each, and the ids of a prompt."""
    limits = ServingLimits(max_model_len=2**18, max_num_reqs=100, max_num_batched_tokens=100)
    executor = CheckedExecutor()
    layouts = plan_groups(limits, *[AttentionSpec(block_size=64)] * num_groups)
    tables = StagedBlockTables(layouts, device=executor)
    batch = batch_of(range(100), [[0]] * 100)
    tables.step(batch)
    before = executor.num_allocations

    tables.append_block_ids(0, [range(1, 3900 // num_groups)] * num_groups)
    for row in range(1, 100):
        tables.append_block_ids(row, [[1]] * num_groups)
    tables.step(batch)

    assert executor.num_allocations == before


@pytest.mark.fast
def test_only_rows_that_moved_are_copied() -> None:
    tables, executor = tables_of_width(2048)
    stage(tables, REQUESTS, 16)
    order = list(range(100))
    cost_of(executor, tables, batch_of(order))
    order[7], order[50] = order[50], order[7]

    swapped = cost_of(executor, tables, batch_of(order))
    left = cost_of(executor, tables, batch_of(order[:99]))

    assert swapped.elements_written == 2 * 16 * 3
    assert left.elements_written == 1 * 16 * 3


@pytest.mark.fast
def test_padding_costs_the_previous_step_and_not_the_buffer() -> None:
    tables, executor = tables_of_width(2048)
    stage(tables, REQUESTS, 1)
    cost_of(executor, tables, batch_of([0], [range(3000)]))

    after_prefill = cost_of(executor, tables, batch_of([0], [[3000]], num_tokens_padded=8192))
    after_decode = cost_of(executor, tables, batch_of([0], [[3001]], num_tokens_padded=8192))

    assert after_prefill.programs == 24 * 3
    assert after_decode.programs == 1 * 3


@pytest.mark.fast
def test_edits_of_one_row_are_written_once() -> None:
    tables, executor = tables_of_width(2048)
    for _ in range(5):
        tables.append_block_ids(3, [[7], [8], [9]])
    tables.append_block_ids(3, [[1], [2], [3]], overwrite=True)

    tables.apply_staged_writes()

    assert executor.counts.elements_written == 3
    assert executor.counts.launches == 1


@pytest.mark.fast
def test_a_commit_sends_the_dirty_span_of_each_row() -> None:
    limits = ServingLimits(max_model_len=64 * 2048, max_num_reqs=256, max_num_batched_tokens=256)
    executor = CheckedExecutor()
    layouts = plan_groups(
        limits,
        AttentionSpec(block_size=64),
        (AttentionSpec(block_size=64), 16),
        MambaSpec(block_size=64),
    )
    tables = MultiGroupBlockTable(layouts, device=executor)
    for row in range(256):
        tables.append_row([list(range(1, 101)), list(range(1, 101)), [row + 1]], row)
    tables.commit(256)
    executor.counts = Counts()

    for row in range(STEADY_ROWS):
        tables.append_row([[5], [6], []], row)
    tables.commit(256)

    assert (executor.counts.copies, executor.counts.launches) == (1, 1)
    assert executor.counts.bytes_sent <= 2048
    # in the rows, and in the batch rows that mirror them
    assert executor.counts.elements_written == STEADY_ROWS * (1 + 4) * 2


@pytest.mark.fast
def test_a_step_can_be_read_in_ten_files() -> None:
    """As many as a step on the CPU comes through, from the call to what it leaves."""
    limits = ServingLimits(max_model_len=4096, max_num_reqs=4, max_num_batched_tokens=8)
    spec = AttentionSpec(block_size=16)
    tables = StagedBlockTables(plan_groups(limits, spec, (spec, 8)), device="cpu")
    tables.append_block_ids(0, [[1], [2]])
    tables.step(batch_of([0], [[0]]))
    tables.append_block_ids(0, [[3], [4]])
    files = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "bt_" in frame.f_code.co_filename:
            files.add(Path(frame.f_code.co_filename).name)

    sys.setprofile(note)
    try:
        tables.step(batch_of([1, 0], [[], [16]]))
    finally:
        sys.setprofile(None)

    files.discard(Path(__file__).name)
    files.discard("tables.py")
    assert len(files) <= 10, files
    assert "_rows.py" in files


def calls_into(package: str, work: Callable[[], object]) -> list[str]:
    """Return the functions of a package that are called while ``work`` runs."""
    called = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and f"/{package}/" in Path(frame.f_code.co_filename).as_posix():
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.fast
def test_a_decode_step_calls_nothing_of_bt_width() -> None:
    """What a layout says is read from its addressing, and never derived again in a step."""
    limits = ServingLimits(max_model_len=4096, max_num_reqs=4, max_num_batched_tokens=8)
    kinds: list[tuple[CacheSpec, BuilderClass]] = [
        (AttentionSpec(block_size=64), MLAMetadataBuilder),
        (AttentionSpec(block_size=64), DSAIndexerMetadataBuilder),
        (MambaSpec(block_size=64), MambaMetadataBuilder),
    ]
    groups = [
        AttentionGroup(
            name=f"group {place}",
            spec=spec,
            backends=(
                AttentionBackend(
                    name="kernel", builder_class=builder, supported_kernel_block_sizes=[64]
                ),
            ),
        )
        for place, (spec, builder) in enumerate(kinds)
    ]
    setup = init_attention(groups, limits, "cpu")
    tables = StagedBlockTables(setup.layouts, device="cpu")
    tables.append_block_ids(0, [[1], [2], [3]])
    batch = AttentionBatch.from_lengths([5], [1], [False], "cpu")

    def step() -> None:
        found = tables.step(batch_of([0], [[5]]))
        for place, group in enumerate(setup.groups):
            common = CommonAttentionMetadata.from_step(group.layout, found, place, batch)
            for builder in group.builders:
                builder.build(common)

    step()

    assert calls_into("bt_width", step) == []
    assert calls_into("bt_width", lambda: setup.layouts[0].locate(5))
