"""What both tables share: the engine, the plans, and checks of padded counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bt_width import BlockTableLayout, InvalidEditError, InvalidSpecError

from .arrays import HostArray
from .engine import StepEngine
from .executor import Executor, executor_for
from .tokens import Tokens, read_tokens


class BlockTables:
    """Tables of one or more groups on a device."""

    def __init__(
        self,
        layouts: Sequence[BlockTableLayout],
        device: str | torch.device | Executor,
        *,
        num_blocks: Sequence[int] | None,
        max_steps_in_flight: int,
        rows_are_batch: bool,
    ) -> None:
        """Allocate empty tables; see the classes that users make.

        Raises:
            InvalidSpecError: An argument is no such number, or layouts do not go together.
        """
        if type(max_steps_in_flight) is not int or max_steps_in_flight < 1:
            raise InvalidSpecError(
                f"max_steps_in_flight must be an int of at least 1, not {max_steps_in_flight!r}",
                max_steps_in_flight=max_steps_in_flight,
            )
        self._engine = StepEngine(
            layouts,
            executor_for(device),
            num_blocks=num_blocks,
            max_steps_in_flight=max_steps_in_flight,
            rows_are_batch=rows_are_batch,
        )
        self._records = self._engine.records
        self._limits = self._engine.storage.limits

    @property
    def layouts(self) -> tuple[BlockTableLayout, ...]:
        """The plan of each group: the very objects the tables were made from."""
        return self._engine.storage.layouts

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        return self._engine.device

    def _check_num_reqs(self, num_reqs: int, num_reqs_padded: int) -> None:
        if not num_reqs <= num_reqs_padded <= self._limits.max_num_reqs:
            raise InvalidEditError(
                f"num_reqs_padded {num_reqs_padded} must lie in "
                f"{num_reqs}..{self._limits.max_num_reqs}",
                num_reqs_padded=num_reqs_padded,
                num_reqs=num_reqs,
                max_num_reqs=self._limits.max_num_reqs,
            )

    def _read_tokens(
        self, starts: HostArray, positions: HostArray, num_requests: int, num_padded: int
    ) -> Tokens:
        if not 0 <= num_padded <= self._limits.max_num_batched_tokens:
            raise InvalidEditError(
                f"num_tokens_padded {num_padded} must lie in "
                f"0..{self._limits.max_num_batched_tokens}",
                num_tokens_padded=num_padded,
                max_num_batched_tokens=self._limits.max_num_batched_tokens,
            )
        return read_tokens(starts, positions, num_requests, num_padded, self._engine.device)
