"""What a soak compares: tokens in every step, the whole contract in some, all blocks at the end."""

from __future__ import annotations

from collections.abc import Sequence

from bt_runner.errors import VerificationError
from bt_runner.execution.batch import BatchArrays
from bt_runner.replay.check import StepCheck
from bt_runner.replay.sharing.rows import SharedRows
from bt_runner.scheduling.request import Request
from bt_runner.scheduling.step_plan import Scheduled
from bt_runner.soak.counts import Counts
from bt_runner.soak.token_store import TokenStore
from bt_tables import StepTables
from bt_width import BlockTableLayout

_ORACLE_EVERY = 25


class Verification:
    """Compares the steps of one scenario, on all of its ranks."""

    def __init__(
        self,
        names: Sequence[str],
        layouts_of_rank: Sequence[tuple[BlockTableLayout, ...]],
        rows: SharedRows,
        counts: Counts,
    ) -> None:
        """Take what is compared.

        Args:
            names: What the cache groups are called.
            layouts_of_rank: How each rank planned them.
            rows: Who holds which blocks.
            counts: What is counted.
        """
        self._names = tuple(names)
        self._rows = rows
        self._counts = counts
        self._checks = [StepCheck(names, layouts, rows) for layouts in layouts_of_rank]
        self._stores = [
            None if layouts[0].slot_mode == "none" else TokenStore(layouts, pool.num_blocks)
            for layouts, pool in zip(zip(*layouts_of_rank, strict=True), rows.pools, strict=True)
        ]

    def check_tokens(self, scheduled: Sequence[Scheduled], tables: Sequence[StepTables]) -> None:
        """Write and read a step's tokens in every group that keeps tokens.

        Args:
            scheduled: The step's batch.
            tables: What each rank made of it.

        Raises:
            VerificationError: A token is not where it is looked for.
        """
        for group, store in enumerate(self._stores):
            if store is not None:
                slots = [of_rank.slot_mappings[group].cpu().numpy() for of_rank in tables]
                columns = [of_rank.block_tables[group].cpu().numpy() for of_rank in tables]
                store.write(scheduled, slots, group)
                store.read(scheduled, columns, group)

    def check_contract(
        self,
        step: int,
        scheduled: Sequence[Scheduled],
        batch: BatchArrays,
        tables: Sequence[StepTables],
        running: Sequence[Request],
    ) -> None:
        """Derive every column and slot again, and the pools' books; in some steps only.

        Args:
            step: The step, whose number says whether its turn has come.
            scheduled: Its batch.
            batch: The same as arrays.
            tables: What each rank made of it.
            running: The requests that hold blocks.

        Raises:
            VerificationError: The first difference.
        """
        if step % _ORACLE_EVERY:
            return
        for check, of_rank in zip(self._checks, tables, strict=True):
            check.check_tables(scheduled, batch, of_rank)
        self._checks[0].check_books(running)
        self._counts.num_oracle_steps += 1

    def require_all_back(self) -> None:
        """See that every block is in its pool, when nobody is left.

        Raises:
            VerificationError: A pool lacks one.
        """
        for pool, name in zip(self._rows.pools, self._names, strict=True):
            num_lost = pool.capacity - pool.num_free
            if num_lost:
                self._counts.num_lost_blocks += num_lost
                raise VerificationError(
                    f"group {name}: {num_lost} of {pool.capacity} blocks did not come back",
                    group=name,
                    expected=pool.capacity,
                    found=pool.num_free,
                )
