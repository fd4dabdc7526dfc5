"""Every public call of bt-tables refuses what it cannot do, and is then as it was."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.bad_values import Call, refuses_or_answers, spoiled_arguments
from tests.support.plans import serving_limits

import bt_tables
from bt_tables import BlockTableSanitizer, MultiGroupBlockTable, StagedBlockTables, StepBatch
from bt_width import AttentionSpec, BlockTableLayout, RingSpec

LIMITS = serving_limits(64, max_num_reqs=4, max_num_batched_tokens=8)
SPLIT = BlockTableLayout.plan(AttentionSpec(block_size=16), LIMITS, 8)
RING = BlockTableLayout.plan(RingSpec(block_size=4), LIMITS)
LAYOUTS = [SPLIT, RING]
POOLS = [20, 10]
ROWS = {0: [[3, 4], [5]], 2: [[7], [6]]}
STARTS = torch.tensor([0, 2, 3], dtype=torch.int32)
POSITIONS = torch.tensor([0, 1, 17])


def expected_row(row: int, group: int) -> list[int]:
    ids = LAYOUTS[group].expand(ROWS[row][group])
    return ids + [0] * (LAYOUTS[group].width - len(ids))


def shows_its_rows(tables: tuple[torch.Tensor, ...], order: tuple[int, ...]) -> bool:
    return all(
        tables[group][at].tolist() == expected_row(row, group)
        for group in range(2)
        for at, row in enumerate(order)
    )


def batch_of(**changes: Any) -> StepBatch:
    good: dict[str, Any] = {
        "idx_mapping": np.array([2, 0], np.int32),
        "query_start_loc": STARTS,
        "positions": POSITIONS,
        "num_reqs_padded": 3,
        "num_tokens_padded": 5,
    }
    return StepBatch(**{**good, **changes})


def staged_tables() -> StagedBlockTables:
    """One row on the device, another one staged."""
    tables = StagedBlockTables(LAYOUTS, device="cpu", num_blocks=POOLS)
    tables.append_block_ids(0, ROWS[0])
    tables.step(batch_of(idx_mapping=np.array([-1, 0], np.int32)))
    tables.append_block_ids(2, ROWS[2])
    return tables


def batch_tables() -> MultiGroupBlockTable:
    """Row 0 committed, row 2 not yet."""
    tables = MultiGroupBlockTable(LAYOUTS, device="cpu", num_blocks=POOLS)
    tables.add_row(ROWS[0], 0)
    tables.commit(3)
    tables.add_row(ROWS[2], 2)
    return tables


def staged_are_unharmed(tables: StagedBlockTables) -> None:
    made = tables.step(batch_of())

    assert shows_its_rows(made.block_tables, (2, 0))
    slots = [SPLIT.slot(0, SPLIT.expand([7])), SPLIT.slot(1, SPLIT.expand([7]))]
    slots += [SPLIT.slot(17, SPLIT.expand([3, 4])), -1, -1]
    assert made.slot_mappings[0].tolist() == slots


def batch_is_unharmed(tables: MultiGroupBlockTable) -> None:
    tables.commit(3)

    shown = tuple(tables.block_table(group) for group in range(2))
    assert shows_its_rows(tuple(table[::2] for table in shown), (0, 2))
    assert not any(table[1].any() or table[3].any() for table in shown)


GOOD: dict[str, Callable[[], object]] = {
    "row": lambda: 1,
    "src": lambda: 0,
    "dst": lambda: 1,
    "a": lambda: 0,
    "b": lambda: 2,
    "group": lambda: 0,
    "num_blocks": lambda: 0,
    "block_ids": lambda: [[8], [9]],
    "overwrite": lambda: False,
    "rows": lambda: np.array([1, 3], np.int32),
    "counts": lambda: np.array([[1, 0], [1, 1]], np.int32),
    "ids": lambda: np.array([8, 9, 9], np.int32),
    "idx_mapping": lambda: np.array([2, 0], np.int32),
    "query_start_loc": STARTS.clone,
    "positions": POSITIONS.clone,
    "num_reqs_padded": lambda: 3,
    "num_tokens_padded": lambda: 5,
    "num_reqs": lambda: 3,
    "num_tokens": lambda: 5,
    "seq_lens": lambda: np.array([0, 9, 0], np.int32),
}
STAGED = {
    "append_block_ids": ("row", "block_ids"),
    "stage": ("rows", "counts", "ids"),
    "clear_row": ("row",),
    "null_prefix": ("row", "group", "num_blocks"),
    "num_blocks": ("row", "group"),
    "rows": ("group",),
    "gather_block_tables": ("idx_mapping", "num_reqs_padded"),
    "compute_slot_mappings": (
        "idx_mapping",
        "query_start_loc",
        "positions",
        "num_tokens_padded",
    ),
    "dummy_block_tables": ("num_reqs",),
    "dummy_slot_mappings": ("num_tokens",),
    "gather_csr": ("group", "seq_lens", "num_reqs"),
    "gather_token_csr": ("group", "seq_lens", "num_reqs"),
}
BATCH = {
    "append_row": ("block_ids", "row"),
    "add_row": ("block_ids", "row"),
    "append_rows": ("rows", "counts", "ids"),
    "clear_row": ("row",),
    "move_row": ("src", "dst"),
    "swap_rows": ("a", "b"),
    "null_prefix": ("row", "group", "num_blocks"),
    "commit": ("num_reqs",),
    "num_blocks": ("row", "group"),
    "rows": ("group",),
    "block_table": ("group",),
    "compute_slot_mappings": ("query_start_loc", "positions", "num_tokens_padded"),
    "gather_csr": ("group", "seq_lens", "num_reqs"),
}
STEP = ("idx_mapping", "query_start_loc", "positions", "num_reqs_padded", "num_tokens_padded")


def staged_call(name: str) -> Call:
    tables = staged_tables()
    good = {argument: GOOD[argument] for argument in STAGED[name]}
    method = getattr(tables, name)
    return Call(f"StagedBlockTables.{name}", method, good, lambda: staged_are_unharmed(tables))


def step_call() -> Call:
    tables = staged_tables()
    good = {argument: GOOD[argument] for argument in STEP}
    return Call(
        "StagedBlockTables.step",
        lambda **parts: tables.step(StepBatch(**parts)),
        good,
        lambda: staged_are_unharmed(tables),
    )


def batch_call(name: str) -> Call:
    tables = batch_tables()
    good = {argument: GOOD[argument] for argument in BATCH[name]}
    if "seq_lens" in good:
        good["seq_lens"] = lambda: np.array([9, 0, 0], np.int32)
    method = getattr(tables, name)
    return Call(f"MultiGroupBlockTable.{name}", method, good, lambda: batch_is_unharmed(tables))


def constructor_call(kind: Callable[..., object]) -> Call:
    return Call(
        str(kind),
        kind,
        {
            "layouts": lambda: LAYOUTS,
            "device": lambda: "cpu",
            "num_blocks": lambda: POOLS,
            "max_steps_in_flight": lambda: 2,
        },
    )


def sanitizer_call() -> Call:
    checker = BlockTableSanitizer(LAYOUTS, POOLS, mode="report")
    tables = staged_tables()
    made = tables.step(batch_of())

    def check(**arguments: Any) -> object:
        return checker.check(**arguments)

    return Call(
        "BlockTableSanitizer.check",
        check,
        {
            "block_tables": lambda: made.block_tables,
            "slot_mappings": lambda: made.slot_mappings,
            "seq_lens": lambda: torch.tensor([2, 18], dtype=torch.int32),
            "query_start_loc": lambda: STARTS,
            "num_blocks_of_row": lambda: torch.tensor([[1, 1], [2, 1]], dtype=torch.int32),
            "ref_counts": lambda: [torch.ones(count, dtype=torch.int32) for count in POOLS],
        },
        lambda: staged_are_unharmed(tables),
    )


def sanitizer_constructor() -> Call:
    return Call(
        "BlockTableSanitizer",
        lambda layouts, num_blocks, **options: BlockTableSanitizer(layouts, num_blocks, **options),
        {
            "layouts": lambda: LAYOUTS,
            "num_blocks": lambda: POOLS,
            "mode": lambda: "report",
            "max_findings": lambda: 5,
            "every": lambda: 2,
        },
    )


def cache_call(name: str) -> Call:
    cache = torch.zeros(20, 16, 3)
    good: dict[str, dict[str, Callable[[], object]]] = {
        "kv_cache_shape": {
            "layout": lambda: SPLIT,
            "num_blocks": lambda: 20,
            "state_shape": lambda: (3,),
            "member": lambda: None,
        },
        "kernel_block_view": {
            "cache": lambda: cache,
            "layout": lambda: SPLIT,
            "member": lambda: None,
        },
        "state_slots": {
            "slot_mapping": lambda: torch.tensor([3, -1]),
            "positions": lambda: torch.tensor([7, 8]),
            "tokens_per_state": lambda: 4,
        },
        "write_states": {
            "cache": lambda: cache,
            "slots": lambda: torch.tensor([3, -1]),
            "states": lambda: torch.ones(2, 3),
        },
    }

    def cache_is_unharmed() -> None:
        assert not cache.any()

    return Call(name, getattr(bt_tables, name), good[name], cache_is_unharmed)


MAKERS: list[tuple[str, Callable[[], Call]]] = [
    *((f"staged {name}", lambda name=name: staged_call(name)) for name in STAGED),
    ("staged step", step_call),
    *((f"batch {name}", lambda name=name: batch_call(name)) for name in BATCH),
    ("staged tables", lambda: constructor_call(StagedBlockTables)),
    ("batch tables", lambda: constructor_call(MultiGroupBlockTable)),
    ("check", sanitizer_call),
    ("sanitizer", sanitizer_constructor),
    *(
        (name, lambda name=name: cache_call(name))
        for name in ("kv_cache_shape", "kernel_block_view", "state_slots", "write_states")
    ),
]


def draw_call(data: st.DataObject) -> Call:
    _, make = data.draw(st.sampled_from(MAKERS))
    return make()


def assert_bad_input_is_refused(data: st.DataObject) -> None:
    call = draw_call(data)
    refuses_or_answers(call, data.draw(spoiled_arguments(call)))


@pytest.mark.parametrize("make", [make for _, make in MAKERS], ids=[name for name, _ in MAKERS])
def test_the_arguments_that_are_spoiled_were_good(make: Callable[[], Call]) -> None:
    """A call that refuses anyway would prove nothing."""
    call = make()

    call.function(**{name: value() for name, value in call.good.items()})


@pytest.mark.parametrize("make", [make for _, make in MAKERS], ids=[name for name, _ in MAKERS])
def test_what_must_be_unharmed_is_so_before(make: Callable[[], Call]) -> None:
    make().unharmed()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_bad_input_is_refused(data: st.DataObject) -> None:
    assert_bad_input_is_refused(data)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_much_bad_input_is_refused(data: st.DataObject) -> None:
    assert_bad_input_is_refused(data)
