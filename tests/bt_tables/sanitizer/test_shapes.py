"""Host checks: shapes, strides, types and addresses, group by group."""

from typing import Any

import pytest
import torch
from tests.support.plans import serving_limits

from bt_tables.sanitizer import BlockTableSanitizer, FaultKind, SanitizerReport
from bt_width import AttentionSpec, BlockTableLayout

pytestmark = pytest.mark.fast

LIMITS = serving_limits(64, max_num_reqs=4, max_num_batched_tokens=16)
LAYOUT = BlockTableLayout.plan(AttentionSpec(block_size=16), LIMITS)
WIDTH = LAYOUT.width


def sanitizer(**options: Any) -> BlockTableSanitizer:
    return BlockTableSanitizer([LAYOUT, LAYOUT], [9, 9], mode="report", **options)


def check(
    checker: BlockTableSanitizer, table: torch.Tensor, slots: torch.Tensor
) -> SanitizerReport:
    """Check an idle step whose second group is sound."""
    return checker.check(
        [torch.zeros(4, WIDTH, dtype=torch.int32) if table is None else table, SOUND_TABLE],
        [slots, SOUND_SLOTS],
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        num_blocks_of_row=torch.zeros(2, 2, dtype=torch.int32),
    )


SOUND_TABLE = torch.zeros(4, WIDTH, dtype=torch.int32)
SOUND_SLOTS = torch.full((16,), -1)


@pytest.mark.parametrize(
    ("table", "kind", "value"),
    [
        pytest.param(SOUND_TABLE.long(), FaultKind.DTYPE, "torch.int64", id="wide-ids"),
        pytest.param(SOUND_TABLE[:1], FaultKind.ROWS, 1, id="fewer-rows-than-requests"),
        pytest.param(SOUND_TABLE.repeat(2, 1), FaultKind.ROWS, 8, id="more-rows-than-planned"),
        pytest.param(SOUND_TABLE[:, 1:], FaultKind.WIDTH, WIDTH - 1, id="narrow"),
        pytest.param(SOUND_TABLE.repeat(1, 2), FaultKind.WIDTH, 2 * WIDTH, id="wide"),
        pytest.param(
            SOUND_TABLE[:1].expand(4, WIDTH),
            FaultKind.STRIDE,
            "table strides [0, 1]",
            id="one-row-for-all",
        ),
        pytest.param(
            SOUND_TABLE.repeat(1, 2)[:, ::2],
            FaultKind.STRIDE,
            f"table strides [{2 * WIDTH}, 2]",
            id="every-other-column",
        ),
    ],
)
def test_a_table_that_is_not_as_planned_is_named(
    table: torch.Tensor, kind: FaultKind, value: object
) -> None:
    report = check(sanitizer(), table, SOUND_SLOTS)

    assert [(f.kind, f.group, f.value) for f in report.findings] == [(kind, 0, value)]


@pytest.mark.parametrize(
    ("slots", "kind", "value"),
    [
        pytest.param(SOUND_SLOTS.int(), FaultKind.DTYPE, "torch.int32", id="narrow-slots"),
        pytest.param(SOUND_SLOTS.repeat(2), FaultKind.SLOT_COUNT, 32, id="too-many"),
        pytest.param(SOUND_SLOTS[::2], FaultKind.STRIDE, "slot stride 2", id="every-other"),
    ],
)
def test_slots_that_are_not_as_planned_are_named(
    slots: torch.Tensor, kind: FaultKind, value: object
) -> None:
    report = check(sanitizer(), SOUND_TABLE, slots)

    assert [(f.kind, f.group, f.value) for f in report.findings] == [(kind, 0, value)]


def test_a_table_on_another_device_is_named() -> None:
    report = sanitizer().check(
        [SOUND_TABLE, SOUND_TABLE.to("meta")],
        torch.full((2, 4), -1),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        num_blocks_of_row=torch.zeros(2, 2, dtype=torch.int32),
    )

    assert [(f.kind, f.group, f.value) for f in report.findings] == [(FaultKind.DEVICE, 1, "meta")]


def test_a_row_stride_wider_than_the_table_is_welcome() -> None:
    """A guard column in the storage is allowed."""
    wide = torch.zeros(4, WIDTH + 1, dtype=torch.int32)

    assert not check(sanitizer(), wide[:, :WIDTH], SOUND_SLOTS).findings


@pytest.mark.parametrize("is_narrower", [False, True], ids=["wider", "narrower"])
def test_a_row_stride_that_changes_is_named(is_narrower: bool) -> None:
    checker = sanitizer(fixed_addresses=True)
    storage = torch.zeros(12 * WIDTH, dtype=torch.int32)
    narrow = storage[: 4 * WIDTH].view(4, WIDTH)
    wide = storage[: 8 * WIDTH].view(4, 2 * WIDTH)[:, :WIDTH]
    before, after = (wide, narrow) if is_narrower else (narrow, wide)
    check(checker, before, SOUND_SLOTS)

    report = check(checker, after, SOUND_SLOTS)

    (found,) = report.findings
    assert (found.kind, found.expected) == (FaultKind.STRIDE, before.stride(0))
    assert found.value == f"table row stride {after.stride(0)}"


def test_a_batch_that_grows_and_shrinks_does_not_move() -> None:
    checker = sanitizer()
    rows = [SOUND_TABLE[:count] for count in (2, 4, 2, 3)]

    reports = [check(checker, table, SOUND_SLOTS[: len(table)]) for table in rows]

    assert [report.num_faults for report in reports] == [0, 0, 0, 0]


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "free"])
def test_a_tensor_that_moves_is_named_where_addresses_are_fixed(fixed: bool) -> None:
    checker = sanitizer(fixed_addresses=fixed)
    check(checker, SOUND_TABLE, SOUND_SLOTS)

    report = check(checker, SOUND_TABLE.clone(), SOUND_SLOTS.clone())

    assert [f.kind for f in report.findings] == [FaultKind.ADDRESS] * (2 * fixed)


def test_the_other_groups_of_a_misshapen_step_are_still_checked() -> None:
    checker = sanitizer()
    slots = SOUND_SLOTS.clone()
    slots[3] = 40

    report = checker.check(
        [SOUND_TABLE[:, 1:], SOUND_TABLE],
        [SOUND_SLOTS, slots],
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        num_blocks_of_row=torch.zeros(2, 2, dtype=torch.int32),
    )

    assert [(f.kind, f.group) for f in report.findings] == [
        (FaultKind.WIDTH, 0),
        (FaultKind.PADDING_SLOT, 1),
    ]
