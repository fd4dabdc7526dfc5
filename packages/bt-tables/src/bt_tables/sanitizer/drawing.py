"""Draws the row of a finding from the table that it was found in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bt_width import NULL_BLOCK, BlockTableLayout, InvalidEditError

from .findings import FaultKind, Finding, name_of
from .picture import UNKNOWN, PictureColumn, RowPicture

_KNOWS_THE_ID = (
    FaultKind.BROKEN_SPLIT,
    FaultKind.STALE_TAIL,
    FaultKind.PADDING_ROW,
    FaultKind.WRONG_BLOCK,
)


def draw_row(
    finding: Finding,
    layout: BlockTableLayout,
    block_table: torch.Tensor,
    *,
    block_ids: Sequence[int] | None = None,
    request_ids: Sequence[int | str] | None = None,
    edits: Sequence[str] = (),
    around: int = 4,
) -> RowPicture:
    """Draw the row of a finding around its column.

    Args:
        finding: The finding; it must have a row.
        layout: The layout of its group.
        block_table: The group's [rows, W] table.
        block_ids: The blocks that the request holds, where they are known.
        request_ids: The requests of the first rows, by which the other holders of a block are
            named; by default their rows.
        edits: The row's last edits, oldest first.
        around: Columns on each side.

    Raises:
        InvalidEditError: The finding has no row, or the table does not have it.
        BlockTableError: ``block_ids`` do not fit a row of this layout.
    """
    row, marked = finding.row, finding.column
    if row is None or not 0 <= row < block_table.shape[0]:
        raise InvalidEditError(
            f"the finding's row {row} is not one of the table's {block_table.shape[0]}: {finding}",
            row=row,
            num_rows=block_table.shape[0],
        )
    width = block_table.shape[1]
    centre = min(marked or 0, max(width - 1, 0))
    columns = range(max(centre - around, 0), min(centre + around + 1, width))
    found = block_table[row, columns.start : columns.stop].tolist()
    expected = _expected(finding, layout, block_ids, columns)
    split = layout.kernel_blocks_per_block
    return RowPicture(
        title=finding.text,
        columns=tuple(
            PictureColumn(
                column,
                str(kernel_id),
                expected[at],
                _other_holders(block_table, row, kernel_id // split, split, request_ids),
            )
            for at, (column, kernel_id) in enumerate(zip(columns, found, strict=True))
        ),
        marked=marked,
        edits=tuple(edits),
    )


def _expected(
    finding: Finding,
    layout: BlockTableLayout,
    block_ids: Sequence[int] | None,
    columns: range,
) -> list[str]:
    if block_ids is not None:
        ids = layout.expand(block_ids)
        return [str(ids[column] if column < len(ids) else NULL_BLOCK) for column in columns]
    known = finding.column if finding.kind in _KNOWS_THE_ID else None
    return [str(finding.expected) if column == known else UNKNOWN for column in columns]


def _other_holders(
    block_table: torch.Tensor,
    row: int,
    block: int,
    split: int,
    request_ids: Sequence[int | str] | None,
) -> tuple[str, ...]:
    if block <= NULL_BLOCK:
        return ()
    heads = torch.div(block_table[:, ::split], split, rounding_mode="floor")
    rows = (heads == block).any(dim=1).nonzero()[:, 0].tolist()
    names: Sequence[int | str] = range(block_table.shape[0]) if request_ids is None else request_ids
    return tuple(
        name_of(names[other]) if other < len(names) else f"row {other}"
        for other in rows
        if other != row
    )
