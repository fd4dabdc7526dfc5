"""The sanitizer's own promises: what it raises, what it keeps, when it looks."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.small_engine import SmallStep
from tests.support.spoiled_steps import HYBRID_POOLS, copy_of, hybrid_layouts, plain_engine

from bt_tables.sanitizer import BlockTableFaultError, BlockTableSanitizer, FaultKind
from bt_width import (
    AttentionSpec,
    BlockTableError,
    BlockTableLayout,
    InvalidEditError,
    InvalidSpecError,
    ServingLimits,
    WidthMismatchError,
)

pytestmark = pytest.mark.fast

LAYOUTS = hybrid_layouts()


def sanitizer(**options: Any) -> BlockTableSanitizer:
    return BlockTableSanitizer(LAYOUTS, HYBRID_POOLS, **options)


def sound_step() -> SmallStep:
    engine = plain_engine(LAYOUTS, HYBRID_POOLS, seed=5)
    step = engine.step()
    while len(step.requests) < 3 or step.num_tokens < 5:
        step = engine.step()
    return step


def arguments(step: SmallStep, **changes: Any) -> dict[str, Any]:
    names = {
        "block_tables": step.block_tables,
        "slot_mappings": step.slot_mappings,
        "seq_lens": step.seq_lens,
        "query_start_loc": step.query_start_loc,
        "num_blocks_of_row": step.num_blocks_of_row,
        "ref_counts": step.ref_counts,
        "ref_blocks": step.ref_blocks,
    }
    return {**names, **changes}


def broken_step(places: int = 1) -> SmallStep:
    step = copy_of(sound_step())
    step.slot_mappings[0, :places] = torch.arange(5_000, 5_000 + places)
    return step


def test_a_sound_step_gives_an_empty_report() -> None:
    report = sanitizer().check(**arguments(sound_step()))

    assert report.findings == ()
    assert report.num_faults == 0
    assert report.text == "step 0: no faults"


def test_a_token_in_a_rows_last_column_has_its_slot_there() -> None:
    """No alignment leaves a column free behind it."""
    limits = ServingLimits(max_model_len=12, max_num_reqs=1, max_num_batched_tokens=4)
    layout = BlockTableLayout.plan(AttentionSpec(block_size=4, token_alignment=None), limits)
    slots = [layout.slot(position, [2, 5, 7]) for position in range(8, 12)]

    report = BlockTableSanitizer([layout], [9]).check(
        [torch.tensor([[2, 5, 7]], dtype=torch.int32)],
        torch.tensor([slots]),
        torch.tensor([12], dtype=torch.int32),
        torch.tensor([0, 4], dtype=torch.int32),
        num_blocks_of_row=torch.tensor([[3]], dtype=torch.int32),
    )

    assert layout.width == 3
    assert report.num_faults == 0


def test_a_fault_raises_with_its_report() -> None:
    with pytest.raises(BlockTableFaultError, match=r"slot-out-of-pool: .*group 0") as raised:
        sanitizer().check(**arguments(broken_step()))

    assert [finding.kind for finding in raised.value.report.findings] == ["slot-out-of-pool"]
    assert isinstance(raised.value, BlockTableError)
    assert raised.value.details["report"] is raised.value.report


def test_in_report_mode_findings_are_collected() -> None:
    checker, step = sanitizer(mode="report", max_findings=3), broken_step(2)

    first = checker.check(**arguments(step))
    second = checker.check(**arguments(step))

    assert first.num_faults == second.num_faults == 2
    assert [finding.token for finding in checker.findings] == [0, 1, 0]
    assert checker.num_faults == 4


def test_a_report_keeps_no_more_than_it_was_told_and_counts_all() -> None:
    report = sanitizer(mode="report", max_findings=2).check(**arguments(broken_step(5)))

    assert len(report.findings) == 2
    assert report.num_faults == 5
    assert report.text.endswith("  and 3 more")


def test_only_every_nth_step_is_checked() -> None:
    checker, step = sanitizer(mode="report", every=3), broken_step()

    reports = [checker.check(**arguments(step)) for _ in range(7)]

    assert [report.checked for report in reports] == [True, False, False] * 2 + [True]
    assert reports[1].text == "step 1: not checked"
    assert checker.num_faults == 3


def test_without_counts_the_report_says_what_was_not_checked() -> None:
    report = sanitizer().check(**arguments(sound_step(), ref_counts=None, ref_blocks=None))

    assert report.checks_off == ("freed blocks", "shared blocks", "exchanged blocks")
    assert report.text.splitlines()[1:] == [
        "  not checked without ref_counts: freed blocks, shared blocks",
        "  not checked without ref_blocks: exchanged blocks",
    ]


def test_a_block_written_in_two_rows_is_found_without_counts() -> None:
    step = copy_of(sound_step())
    rows = [row for row, held in enumerate(step.num_blocks_of_row[:, 3].tolist()) if held]
    step.block_tables[3][rows[1], 0] = step.block_tables[3][rows[0], 0]

    report = sanitizer(mode="report").check(**arguments(step, ref_counts=None, ref_blocks=None))

    assert [(f.kind, f.row, f.other_owner) for f in report.findings] == [
        (FaultKind.DUPLICATE_BLOCK, rows[1], rows[0])
    ]


def test_a_fault_that_stays_is_found_again() -> None:
    """After a fault, what lies past a row is not taken for known."""
    checker, step = sanitizer(mode="report"), sound_step()
    step.block_tables[0][0, -1] = 9

    reports = [checker.check(**arguments(step)) for _ in range(3)]

    assert [report.num_faults for report in reports] == [1, 1, 1]


def test_past_a_row_no_more_is_read_than_the_row_once_reached() -> None:
    checker, step = sanitizer(mode="report"), sound_step()
    checker.check(**arguments(step))
    step.block_tables[0][0, -1] = 9

    assert checker.check(**arguments(step)).num_faults == 0


def test_between_unchecked_steps_rows_are_read_to_the_width() -> None:
    checker, step = sanitizer(mode="report", every=2), sound_step()
    checker.check(**arguments(step))
    step.block_tables[0][0, -1] = 9

    reports = [checker.check(**arguments(step)) for _ in range(2)]

    assert [report.num_faults for report in reports] == [0, 1]


def test_rebind_lets_tensors_move_and_rows_be_unknown() -> None:
    checker = sanitizer(mode="report")
    step = sound_step()
    checker.check(**arguments(step))
    moved = copy_of(step)
    moved.block_tables[0][0, -1] = 9

    checker.rebind()
    report = checker.check(**arguments(moved))

    assert [finding.kind for finding in report.findings] == [FaultKind.STALE_TAIL]


def test_slots_may_come_as_one_tensor_a_group() -> None:
    step = sound_step()
    slots = [row.clone() for row in step.slot_mappings]

    assert not sanitizer().check(**arguments(step, slot_mappings=slots)).findings


def test_padded_lengths_and_starts_are_welcome() -> None:
    step = sound_step()
    pad = torch.nn.functional.pad
    padded = {
        "seq_lens": pad(step.seq_lens, (0, 2)),
        "query_start_loc": pad(step.query_start_loc, (0, 2), value=step.num_tokens),
    }

    assert not sanitizer().check(**arguments(step, **padded)).findings


def test_lengths_and_counts_may_be_64_bits_wide() -> None:
    step = sound_step()
    names = ("seq_lens", "query_start_loc", "num_blocks_of_row")
    wide = {name: getattr(step, name).long() for name in names}

    assert not sanitizer().check(**arguments(step, **wide)).findings


def test_no_groups_and_no_requests_are_a_step_too() -> None:
    empty = BlockTableSanitizer([], []).check(
        (),
        torch.empty(0, 4, dtype=torch.int64),
        torch.empty(0, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        num_blocks_of_row=torch.empty(0, 0, dtype=torch.int32),
        ref_counts=(),
    )
    idle = sanitizer().check(
        [torch.zeros(0, layout.width, dtype=torch.int32) for layout in LAYOUTS],
        torch.empty(5, 0, dtype=torch.int64),
        torch.empty(0, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        num_blocks_of_row=torch.empty(0, 5, dtype=torch.int32),
    )

    assert empty.findings == idle.findings == ()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"block_tables": None}, InvalidSpecError, "block_tables"),
        ({"block_tables": [1, 2, 3, 4, 5]}, InvalidSpecError, "block_tables"),
        ({"block_tables": ()}, InvalidEditError, "5 groups, got 0"),
        ({"block_tables": [torch.zeros(3)] * 5}, WidthMismatchError, "2 dimensions"),
        ({"slot_mappings": torch.tensor(3)}, WidthMismatchError, "scalar"),
        ({"slot_mappings": "slots"}, InvalidSpecError, "slot_mappings"),
        ({"slot_mappings": torch.zeros(4, 9)}, InvalidEditError, "5 groups, got 4"),
        ({"seq_lens": [3, 4]}, InvalidSpecError, "seq_lens must be a tensor, not list"),
        ({"seq_lens": torch.tensor([float("nan")] * 5)}, WidthMismatchError, "float32"),
        ({"seq_lens": torch.tensor([3, 4])}, WidthMismatchError, "at least 3 entries, got 2"),
        ({"query_start_loc": torch.zeros(3).int()}, WidthMismatchError, "at least 4"),
        ({"num_blocks_of_row": torch.zeros(3).int()}, WidthMismatchError, "2 dimensions"),
        ({"num_blocks_of_row": torch.zeros(3, 4).int()}, WidthMismatchError, "5 groups"),
        ({"ref_counts": torch.zeros(5, 3)}, WidthMismatchError, "int32"),
        ({"ref_counts": [torch.zeros(3).int()] * 5}, WidthMismatchError, "40 entries, got 3"),
        ({"ref_blocks": [torch.zeros(3).int()] * 5}, WidthMismatchError, "2 dimensions"),
        ({"ref_blocks": [torch.zeros(2, 9).int()] * 5}, WidthMismatchError, "3 entries, got 2"),
        ({"request_ids": ["a"]}, WidthMismatchError, "each of 3 requests, got 1"),
        ({"request_ids": [None] * 3}, InvalidSpecError, "ints or strings"),
        ({"request_ids": "abc"}, InvalidSpecError, "list or tuple"),
    ],
)
def test_what_describes_no_step_is_refused(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    step = sound_step()
    step = replace(step, num_blocks_of_row=step.num_blocks_of_row[:3])
    checker = sanitizer(every=2)

    with pytest.raises(error, match=words):
        checker.check(**arguments(step, **change))

    assert checker.check(**arguments(sound_step())).checked, "a refused call counted as a step"


@pytest.mark.parametrize(
    ("args", "options", "error", "words"),
    [
        ((None, [1]), {}, InvalidSpecError, "layouts"),
        ((LAYOUTS, 5), {}, InvalidSpecError, "num_blocks"),
        ((["layout"], [5]), {}, InvalidSpecError, "BlockTableLayout"),
        ((LAYOUTS, [5]), {}, InvalidEditError, "5 groups, got 1"),
        ((LAYOUTS[:1], [0]), {}, InvalidSpecError, "at least 1, not 0"),
        ((LAYOUTS[:1], [2.0]), {}, InvalidSpecError, "not 2.0"),
        ((LAYOUTS[:1], [5]), {"mode": "warn"}, InvalidSpecError, "'warn'"),
        ((LAYOUTS[:1], [5]), {"every": 0}, InvalidSpecError, "every"),
        ((LAYOUTS[:1], [5]), {"max_findings": True}, InvalidSpecError, "max_findings"),
    ],
)
def test_what_plans_no_checks_is_refused(
    args: tuple[Any, Any], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        BlockTableSanitizer(*args, **options)


def test_the_sanitizer_does_not_import_triton_or_rich() -> None:
    program = (
        "import sys, bt_tables.sanitizer; "
        "print([name for name in ('triton', 'rich') if name in sys.modules])"
    )

    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert shown.stdout.strip() == b"[]"


def test_a_finding_names_the_request_that_the_caller_named() -> None:
    step = broken_step()
    names = [f"chat-{row}" for row in range(len(step.requests))]

    report = sanitizer(mode="report").check(**arguments(step), request_ids=names)

    (finding,) = report.findings
    assert finding.row is not None
    assert finding.request == names[finding.row]
    assert f"request '{names[finding.row]}'" in report.text


def test_a_finding_is_drawn_with_what_is_known_of_its_row() -> None:
    step = copy_of(sound_step())
    rows = [row for row, held in enumerate(step.num_blocks_of_row[:, 3].tolist()) if held]
    first, second = rows[:2]
    found = int(step.block_tables[3][first, 0])
    given = int(step.block_tables[3][second, 0])
    step.block_tables[3][second, 0] = found
    names = [f"chat-{row}" for row in range(len(step.requests))]

    report = sanitizer(mode="report").check(
        **arguments(step), request_ids=names, edits_of=lambda row: [f"edit of row {row}"]
    )

    drawn = next(f.picture for f in report.findings if f.kind is FaultKind.WRONG_BLOCK)
    assert drawn is not None
    assert drawn.edits == (f"edit of row {second}",)
    assert drawn.columns[0] == (0, str(found), str(given), (f"'chat-{first}'",))


def test_edits_are_asked_for_only_where_something_is_wrong() -> None:
    def edits_of(row: int) -> list[str]:
        raise AssertionError(f"nothing is wrong with row {row}")

    report = sanitizer().check(**arguments(sound_step()), edits_of=edits_of)

    assert report.findings == ()


def test_blocks_that_are_none_are_drawn_as_null() -> None:
    """The caller's own numbers may be the fault."""
    step = copy_of(sound_step())
    step.ref_blocks[0].fill_(-7)

    report = sanitizer(mode="report").check(**arguments(step))

    drawn = [f.picture for f in report.findings if f.kind is FaultKind.WRONG_BLOCK]
    assert drawn
    assert all(shown.expected == "0" for picture in drawn if picture for shown in picture.columns)


def test_ids_that_an_engine_leaves_behind_may_be_ignored() -> None:
    """Past a row and before its state, and there alone."""
    step = copy_of(sound_step())
    held = step.num_blocks_of_row[:, 2].tolist()
    starts = step.query_start_loc.diff().tolist()
    row = next(row for row, blocks in enumerate(held) if blocks and starts[row])
    step.block_tables[2][row, held[row]] = 9
    checker = sanitizer(mode="report", checks_untouched=False)

    assert not checker.check(**arguments(step)).findings
    assert sanitizer(mode="report").check(**arguments(step)).findings

    step.block_tables[2][row, held[row] - 1] = 9
    assert checker.check(**arguments(step)).findings


def test_a_prefix_that_is_computed_in_the_step_may_be_shared_where_the_engine_does_so() -> None:
    step = copy_of(sound_step())
    starts = step.query_start_loc.diff().tolist()
    row = next(row for row in range(len(step.requests)) if starts[row])
    last = int(step.num_blocks_of_row[row, 3]) - 1
    step.ref_counts[3][step.block_tables[3][row, last]] += 1

    found = sanitizer(mode="report").check(**arguments(step)).findings
    allowed = sanitizer(mode="report", checks_shared_writes=False).check(**arguments(step)).findings

    assert [finding.kind for finding in found] == [FaultKind.SHARED_WRITE]
    assert allowed == ()
