"""What a finding says, on one line."""

import pickle

import pytest

from bt_tables.sanitizer import BlockTableFaultError, FaultKind, Finding, SanitizerReport

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("kind", list(FaultKind))
def test_every_kind_says_what_it_means(kind: FaultKind) -> None:
    assert len(kind.meaning) > 20
    assert Finding(kind=kind).text == f"{kind.value}: {kind.meaning}"


def test_a_finding_is_one_line_with_its_place_and_numbers() -> None:
    finding = Finding(
        kind=FaultKind.NEIGHBOUR_SLOT,
        group=1,
        row=2,
        request=2,
        column=3,
        token=17,
        value=400,
        expected=208,
        other_owner=5,
    )

    assert str(finding) == (
        "neighbour-slot: a slot lies in a block of another request "
        "(group 1, request 2, column 3, token 17): found 400, expected 208; request 5 has it too"
    )


def test_a_padding_row_is_not_called_a_request() -> None:
    finding = Finding(kind=FaultKind.PADDING_ROW, group=0, row=3, column=1, value=7, expected=0)

    assert finding.text == (
        "padding-row: a padding row is not null (group 0, row 3, column 1): found 7, expected 0"
    )


def test_a_report_is_one_line_a_finding() -> None:
    finding = Finding(kind=FaultKind.UNSTABLE)

    report = SanitizerReport(step=4, findings=(finding,), num_faults=3)

    assert report.text.splitlines() == ["step 4: 3 faults", f"  {finding.text}", "  and 2 more"]


def test_a_report_that_shows_every_finding_ends_there() -> None:
    """However many: numbers are compared, not objects."""
    findings = tuple(Finding(kind=FaultKind.UNSTABLE, row=row) for row in range(300))

    report = SanitizerReport(step=4, findings=findings, num_faults=int("300"))

    assert report.text.splitlines() == ["step 4: 300 faults", *[f"  {f.text}" for f in findings]]


def test_a_report_gives_the_findings_of_one_kind() -> None:
    findings = (Finding(kind=FaultKind.WIDTH), Finding(kind=FaultKind.ROWS))

    report = SanitizerReport(step=0, findings=findings, num_faults=2)

    assert report.of_kind(FaultKind.ROWS) == [findings[1]]


def test_a_request_is_named_by_the_id_that_the_caller_gave() -> None:
    finding = Finding(
        kind=FaultKind.DUPLICATE_BLOCK,
        group=0,
        row=3,
        request="chat-7",
        column=1,
        value=8,
        other_owner="chat-9",
    )

    assert finding.text == (
        "duplicate-block: a block is in more live rows than hold it "
        "(group 0, request 'chat-7', row 3, column 1): found 8; request 'chat-9' has it too"
    )


def test_an_id_cannot_break_the_line_it_stands_in() -> None:
    finding = Finding(kind=FaultKind.LENGTH, row=0, request="a\nstep 5: no faults\x1b[2J")

    assert finding.text.isprintable()


def test_a_fault_error_is_the_same_after_a_pickle() -> None:
    """A worker process hands its report over."""
    finding = Finding(kind=FaultKind.LENGTH, group=0, row=0, request="a", value=3, expected=2)
    error = BlockTableFaultError(SanitizerReport(step=2, findings=(finding,), num_faults=4))

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is BlockTableFaultError
    assert (str(copy), copy.report, copy.details) == (str(error), error.report, error.details)
