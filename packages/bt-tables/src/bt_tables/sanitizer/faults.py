"""Many faults of one kind, as arrays; only those that are shown become findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .findings import FaultKind, Finding

NO_ROW = -1
"""No other owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of one kind in one group; every array is [faults], and None where it does not apply.

    Attributes:
        kind: What is wrong.
        group: The cache group, or None for the whole step.
        row: The rows, ``NO_ROW`` where a token has none.
        column: The columns.
        token: The tokens.
        value: What was found.
        expected: What should have been there.
        other: The other owners' rows, ``NO_ROW`` where there is none.
    """

    kind: FaultKind
    group: int | None
    row: torch.Tensor
    column: torch.Tensor | None = None
    token: torch.Tensor | None = None
    value: torch.Tensor | None = None
    expected: torch.Tensor | None = None
    other: torch.Tensor | None = None

    def __len__(self) -> int:
        """Return how many there are."""
        return self.row.shape[0]

    def findings(self, requests: Sequence[int | str], limit: int) -> Iterator[Finding]:
        """Yield the first ``limit`` of them; ``requests`` names the rows that are not padding."""
        count = min(limit, len(self))
        rows = [_absent_to_none(row) for row in self.row[:count].tolist()]
        columns = _first(self.column, count)
        tokens = _first(self.token, count)
        values, expected = _first(self.value, count), _first(self.expected, count)
        others = [_absent_to_none(other) for other in _first(self.other, count)]
        for index, row in enumerate(rows):
            yield Finding(
                kind=self.kind,
                group=self.group,
                row=row,
                request=_request_of(row, requests),
                column=columns[index],
                token=tokens[index],
                value=values[index],
                expected=expected[index],
                other_owner=_request_of(others[index], requests),
            )


def _request_of(row: int | None, requests: Sequence[int | str]) -> int | str | None:
    return requests[row] if row is not None and row < len(requests) else None


def _first(values: torch.Tensor | None, count: int) -> list[int | None]:
    return [None] * count if values is None else list(values[:count].tolist())


def _absent_to_none(row: int | None) -> int | None:
    return None if row == NO_ROW else row
