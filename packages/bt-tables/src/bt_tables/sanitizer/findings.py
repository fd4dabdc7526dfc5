"""What the sanitizer says: the kinds of fault, a finding with its place, and a step's report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from bt_width import BlockTableError

from .page import Section, render_page
from .picture import RowPicture


class FaultKind(StrEnum):
    """Everything that can be wrong with the block tables and slots of a step."""

    meaning: str
    """What is wrong, in words."""

    def __new__(cls, value: str, meaning: str) -> FaultKind:
        """Make a kind that carries its meaning."""
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.meaning = meaning
        return kind

    DTYPE = "dtype", "a tensor has another dtype than planned"
    DEVICE = "device", "a tensor lies on another device than the first table"
    ROWS = "rows", "a table has fewer rows than the batch or more than planned"
    WIDTH = "width", "a table is not as wide as planned"
    STRIDE = "stride", "a tensor's strides are not those planned"
    ADDRESS = "address", "a tensor has moved, and a captured graph still uses the old address"
    SLOT_COUNT = "slot-count", "there are more slots than the largest step has tokens"
    QUERY_START = "query-start", "query_start_loc does not start at 0, falls, or passes the slots"
    LENGTH = "length", "a request's length is less than its query, or more than planned"
    BLOCK_COUNT = "block-count", "a row is said to hold a number of blocks that no row holds"
    TOO_FEW_BLOCKS = "too-few-blocks", "a row holds fewer blocks than its tokens need"
    OUT_OF_POOL = "out-of-pool", "a live column holds no block of the pool"
    NULL_BLOCK = "null-block", "a column that the step touches holds the null block"
    BROKEN_SPLIT = "broken-split", "a column does not continue the block that its columns share"
    STALE_TAIL = "stale-tail", "a column past the row's blocks is not null"
    PADDING_ROW = "padding-row", "a padding row is not null"
    WRONG_BLOCK = "wrong-block", "a column holds another block than its row was given"
    FREED_BLOCK = "freed-block", "a freed block is in a live row"
    DUPLICATE_BLOCK = "duplicate-block", "a block is in more live rows than hold it"
    SHARED_WRITE = "shared-write", "the step writes to a block that others hold too"
    MISSING_SLOT = "missing-slot", "a token that this rank keeps has no slot"
    FOREIGN_TOKEN = "foreign-token", "a token that this rank does not keep has a slot"
    NULL_SLOT = "null-slot", "a slot lies in the null block"
    SLOT_OUT_OF_POOL = "slot-out-of-pool", "a slot lies outside the pool"
    NEIGHBOUR_SLOT = "neighbour-slot", "a slot lies in a block of another request"
    WRONG_SLOT = "wrong-slot", "a slot is not the one of the token's position"
    SLOT_TWICE = "slot-twice", "two tokens of the step write the same slot"
    PADDING_SLOT = "padding-slot", "a slot above the real tokens is not padding"
    UNSTABLE = "unstable", "the tensors changed while they were checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault and its place; what does not apply is None.

    Attributes:
        kind: What is wrong.
        group: The cache group.
        row: The row of the batch's table.
        request: The id that the caller gave for that row, or the row again; None where the row
            is padding.
        column: The column, in kernel blocks.
        token: The token's place in the step.
        value: What was found: an id, a slot, a count, or words.
        expected: What should have been there.
        other_owner: The other request that holds the block or slot, by its id or its row.
        picture: The row around the column, where it was drawn; two findings are equal without it.
    """

    kind: FaultKind
    group: int | None = None
    row: int | None = None
    request: int | str | None = None
    column: int | None = None
    token: int | None = None
    value: int | str | None = None
    expected: int | str | None = None
    other_owner: int | str | None = None
    picture: RowPicture | None = field(default=None, compare=False, repr=False)

    @property
    def place(self) -> str:
        """Where it is: group, request, row, column and token, as far as they apply."""
        # a request that is known by its row alone is named once
        row = self.row if self.request is None or self.request != self.row else None
        return ", ".join(
            f"{name} {place}"
            for name, place in (
                ("group", self.group),
                ("request", None if self.request is None else name_of(self.request)),
                ("row", row),
                ("column", self.column),
                ("token", self.token),
            )
            if place is not None
        )

    @property
    def text(self) -> str:
        """The finding on one line."""
        found = "" if self.value is None else f": found {self.value}"
        expected = "" if self.expected is None else f", expected {self.expected}"
        other = ""
        if self.other_owner is not None:
            other = f"; request {name_of(self.other_owner)} has it too"
        place = f" ({self.place})" if self.place else ""
        return f"{self.kind}: {self.kind.meaning}{place}{found}{expected}{other}"

    def __str__(self) -> str:
        """Return the text."""
        return self.text


def name_of(request: int | str) -> str:
    """Return a request's id as one printable word: a row as it is, any other id in quotes."""
    return str(request) if isinstance(request, int) else ascii(request)


CheckName = Literal["freed blocks", "shared blocks", "exchanged blocks"]

_NEEDS: dict[CheckName, str] = {
    "freed blocks": "ref_counts",
    "shared blocks": "ref_counts",
    "exchanged blocks": "ref_blocks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SanitizerReport:
    """What one checked step showed.

    Attributes:
        step: The number of the call, from 0.
        checked: Whether the step was looked at; False for the steps between.
        findings: The faults, at most as many as the sanitizer keeps.
        num_faults: All of them, those not kept included.
        checks_off: Checks that need something the caller did not give.
    """

    step: int
    checked: bool = True
    findings: tuple[Finding, ...] = ()
    num_faults: int = 0
    checks_off: tuple[CheckName, ...] = ()

    @property
    def text(self) -> str:
        """The report: a line that counts, one for each finding, and what was not looked at."""
        lines = [self._headline, *(f"  {finding.text}" for finding in self.findings)]
        return "\n".join([*lines, *(f"  {note}" for note in self._notes)])

    def to_html(self) -> str:
        """Return the report as one HTML page that needs nothing else.

        It shows each finding with the row around its column, the blocks expected beside those
        found, the other rows that hold them, and the row's last edits where they are known.
        """
        sections = [
            Section(str(finding.kind), finding.text, finding.picture) for finding in self.findings
        ]
        return render_page(f"Block tables, {self._headline}", sections, self._notes)

    @property
    def _headline(self) -> str:
        if not self.checked:
            return f"step {self.step}: not checked"
        return f"step {self.step}: {self.num_faults or 'no'} fault{'s' * (self.num_faults != 1)}"

    @property
    def _notes(self) -> list[str]:
        if not self.checked:
            return []
        notes = []
        if self.num_faults > len(self.findings):
            notes.append(f"and {self.num_faults - len(self.findings)} more")
        for needed in ("ref_counts", "ref_blocks"):
            names = [name for name in self.checks_off if _NEEDS[name] == needed]
            if names:
                notes.append(f"not checked without {needed}: {', '.join(names)}")
        return notes

    def of_kind(self, kind: FaultKind) -> Sequence[Finding]:
        """Return the findings of one kind."""
        return [finding for finding in self.findings if finding.kind is kind]


class BlockTableFaultError(BlockTableError):
    """A checked step has a fault; ``report`` says which."""

    def __init__(self, report: SanitizerReport) -> None:
        """Raise for ``report``."""
        super().__init__(report.text, report=report)
        self.report = report

    def __reduce__(self) -> tuple[type[BlockTableFaultError], tuple[SanitizerReport]]:
        """Pickle as the report, which holds all the rest."""
        return type(self), (self.report,)
