"""The comparison with the pure contract: every row, every slot and the books of the pools.

What a table holds is derived again from the block ids of each request by ``bt_width``
alone, one token and one row at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bt_runner.errors import VerificationError
from bt_runner.execution.batch import BatchArrays
from bt_runner.replay.sharing.rows import SharedRows
from bt_runner.scheduling.request import Request
from bt_runner.scheduling.step_plan import Scheduled
from bt_tables import StepTables
from bt_width import NULL_BLOCK, PAD_SLOT, BlockTableLayout


class StepCheck:
    """Compares one step's tables with the contract."""

    def __init__(
        self, names: Sequence[str], layouts: Sequence[BlockTableLayout], rows: SharedRows
    ) -> None:
        """Take what the groups are called, how they are planned, and who holds which blocks."""
        self._names = tuple(names)
        self._layouts = tuple(layouts)
        self._rows = rows

    def check_tables(
        self, scheduled: Sequence[Scheduled], batch: BatchArrays, tables: StepTables
    ) -> None:
        """Compare every row and slot of a step.

        Raises:
            VerificationError: The first difference.
        """
        for group, layout in enumerate(self._layouts):
            columns = tables.block_tables[group].cpu().numpy()
            slots = tables.slot_mappings[group].cpu().numpy()
            end = 0
            for index, part in enumerate(scheduled):
                row = layout.expand(part.request.block_ids[group])
                self._check_row(group, part.request.request_id, columns[index], row)
                start, end = end, end + part.num_tokens
                self._check_slots(group, part, slots[start:end], row)
            self._check_padding(group, columns[len(scheduled) :], NULL_BLOCK)
            self._check_padding(group, slots[end : batch.num_tokens], PAD_SLOT)

    def check_books(self, running: Sequence[Request]) -> None:
        """Compare what requests and the prefix cache hold with the books of the pools.

        Raises:
            VerificationError: The first difference.
        """
        for group, pool in enumerate(self._rows.pools):
            held: Counter[int] = Counter(self._rows.prefixes.held_blocks(group))
            for request in running:
                held.update(request.block_ids[group])
            del held[NULL_BLOCK]
            if len(held) != pool.num_used:
                raise self._difference(group, "blocks in use", len(held), pool.num_used)
            for block_id, count in held.items():
                if pool.references(block_id) != count:
                    what = f"references of block {block_id}"
                    raise self._difference(group, what, count, pool.references(block_id))

    def _check_row(
        self, group: int, request_id: str, found: NDArray[np.int32], ids: Sequence[int]
    ) -> None:
        expected = np.full(found.shape, NULL_BLOCK, dtype=np.int32)
        expected[: len(ids)] = ids
        if not np.array_equal(found, expected):
            column = int((found != expected).argmax())
            raise self._difference(
                group,
                f"column {column} of request {request_id}",
                int(expected[column]),
                int(found[column]),
                request=request_id,
                column=column,
            )

    def _check_slots(
        self, group: int, part: Scheduled, found: NDArray[np.int64], row: Sequence[int]
    ) -> None:
        layout, pool = self._layouts[group], self._rows.pools[group]
        for position, slot in enumerate(found.tolist(), start=part.start):
            expected = PAD_SLOT if layout.slot_mode == "none" else layout.slot(position, row)
            shared = slot != PAD_SLOT and pool.references(slot // layout.block_size) > 1
            if slot != expected or shared:
                column = 0 if layout.slot_mode == "none" else layout.locate(position).column
                request_id = part.request.request_id
                what = f"slot of position {position} (column {column}) of request {request_id}"
                raise self._difference(
                    group,
                    f"{what}, whose block is shared," if shared else what,
                    expected,
                    slot,
                    request=request_id,
                    column=column,
                )

    def _check_padding(self, group: int, found: NDArray[np.generic], expected: int) -> None:
        if (found != expected).any():
            stray = found[found != expected].tolist()[0]
            raise self._difference(group, "padding after the batch", expected, stray)

    def _difference(
        self, group: int, what: str, expected: int, found: int, **facts: object
    ) -> VerificationError:
        return VerificationError(
            f"group {self._names[group]}: {what}: expected {expected}, found {found}",
            group=self._names[group],
            expected=expected,
            found=found,
            **facts,
        )
