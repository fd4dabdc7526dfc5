"""One cache group's plan: its counts, and where in its rows a token or a state lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, SupportsIndex, assert_never

from ._checks import as_index
from ._counts import RowCounts
from .errors import InvalidEditError, InvalidSpecError, RowOverflowError
from .limits import ServingLimits
from .specs import CacheSpec, MambaSpec, layers_of
from .width import NULL_BLOCK, PAD_SLOT

MAX_POSITION = 2**31 - 1
"""The last position that has a slot; kernels divide positions as 32-bit integers."""


class Location(NamedTuple):
    """Where a position lies.

    Attributes:
        rank: The context-parallel rank that keeps it; the own one where every rank does.
        column: The kernel-block column in that rank's row.
        offset: Tokens from the start of that kernel block.
    """

    rank: int
    column: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTableLayout(RowCounts):
    """The one object that says how a cache group's rows are cut.

    It stores causes; every number is computed from them, so that none can disagree.
    Tables and builders of a group hold the same object.

    Attributes:
        spec: What the group is.
        limits: What the server allows.
        kernel_block_size: Tokens of a kernel block, which is what a column holds.
    """

    @classmethod
    def plan(
        cls, spec: CacheSpec, limits: ServingLimits, kernel_block_size: int | None = None
    ) -> Self:
        """Plan a group's rows.

        Args:
            spec: What the group is.
            limits: What the server allows.
            kernel_block_size: Tokens of a kernel block; the block itself by default.

        Raises:
            InvalidSpecError: The three do not go together; the message says why.
        """
        if kernel_block_size is None:
            kernel_block_size = layers_of(spec)[0].block_size
        return cls(spec=spec, limits=limits, kernel_block_size=kernel_block_size)

    def state_column(self, num_tokens: SupportsIndex) -> int:
        """Return the column of the recurrent state after ``num_tokens`` tokens.

        Raises:
            InvalidSpecError: The group keeps no state, or ``num_tokens`` is no count.
            RowOverflowError: The column is at or past the width.
        """
        count = as_index("num_tokens", num_tokens, minimum=0)
        spec = layers_of(self.spec)[0]
        if not isinstance(spec, MambaSpec):
            raise InvalidSpecError(f"a group of kind {self.kind} has no state column")
        column = max(count - 1, 0) // spec.block_size if spec.mode == "align" else 0
        if column >= self.width:
            raise RowOverflowError(
                f"the state after {count} tokens lies in column {column}, at or past the "
                f"width {self.width}: {self.explain()}",
                column=column,
                width=self.width,
            )
        return column

    def locate(self, position: SupportsIndex) -> Location:
        """Return where ``position`` lies; past the row, the column it would be.

        Ownership is decided in blocks; the kernel block only cuts the result.

        Raises:
            InvalidSpecError: ``position`` is negative, or the group has no slots.
        """
        index = as_index("position", position, minimum=0)
        context = self.limits.context_parallel
        match self.slot_mode:
            case "none":
                raise InvalidSpecError(f"a group of kind {self.kind} has no slots")
            case "ring":
                return Location(context.rank, 0, index % self.block_size)
            case "block":
                rank, local = context.rank, index
            case _ as mode:
                assert_never(mode)
        if self.shards > 1:
            rank, local = context.place(index)
        column, offset = divmod(local, self.kernel_block_size)
        return Location(rank, column, offset)

    def slot(self, position: SupportsIndex, kernel_block_ids: Sequence[int]) -> int:
        """Return the cache slot of ``position`` on this rank, in tokens.

        Args:
            position: The token's place in its request.
            kernel_block_ids: The row's ids, bare or padded with ``NULL_BLOCK``.

        Returns:
            ``PAD_SLOT`` where the position is negative or past ``MAX_POSITION``, another
            rank's, past the ids or the width, or in a null column; never a slot of the
            null block.

        Raises:
            InvalidSpecError: An argument is of a wrong type.
            InvalidEditError: The column holds a negative id.
        """
        index = as_index("position", position)
        if self.slot_mode == "none" or not 0 <= index <= MAX_POSITION:
            return PAD_SLOT
        rank, column, offset = self.locate(index)
        if rank != self.limits.context_parallel.rank:
            return PAD_SLOT
        try:
            if column >= min(self.width, len(kernel_block_ids)):
                return PAD_SLOT
            block_id = as_index("a kernel-block id", kernel_block_ids[column])
        except (TypeError, LookupError):
            raise InvalidSpecError(
                f"kernel_block_ids must be a sequence of ints, not {kernel_block_ids!r}",
                value=kernel_block_ids,
            ) from None
        if block_id < 0:
            raise InvalidEditError(
                f"column {column} holds the negative id {block_id}", column=column, id=block_id
            )
        return PAD_SLOT if block_id == NULL_BLOCK else block_id * self.kernel_block_size + offset

    def num_expired_blocks(self, num_computed_tokens: SupportsIndex) -> int:
        """Return the leading blocks of a row that no later step reads.

        They may go back to the pool, and their columns be null, once the step that
        computed the last of these tokens has ended.

        Args:
            num_computed_tokens: Tokens of the request that stay computed.

        Raises:
            InvalidSpecError: It is no count.
        """
        computed = as_index("num_computed_tokens", num_computed_tokens, minimum=0)
        rule = self._rule
        if rule.resident_tokens is not None:
            return max(computed - rule.resident_tokens, 0) // self.block_size
        if rule.resident_blocks is not None:
            return self.state_column(computed)
        return 0

    def expand(self, block_ids: Sequence[int]) -> list[int]:
        """Return the kernel-block ids of ``block_ids``; a null block gives null columns.

        Raises:
            RowOverflowError: There are more than a row holds.
            InvalidEditError: An id is negative or its kernel ids leave int32.
            InvalidSpecError: It is no sequence of ints.
        """
        split, last_id = self.kernel_blocks_per_block, self.max_block_id
        try:
            ids = [as_index("a block id", block_id) for block_id in block_ids]
        except TypeError:
            raise InvalidSpecError(
                f"block_ids must be a sequence of ints, not {block_ids!r}", value=block_ids
            ) from None
        if len(ids) > self.blocks_per_row:
            raise RowOverflowError(
                f"{len(ids)} blocks are more than the {self.blocks_per_row} of a row: "
                f"{self.explain()}",
                num_blocks=len(ids),
                blocks_per_row=self.blocks_per_row,
            )
        for block_id in ids:
            if not 0 <= block_id <= last_id:
                raise InvalidEditError(
                    f"block id {block_id} must lie in 0..{last_id}, "
                    "so that its kernel-block ids are int32",
                    id=block_id,
                    max_block_id=last_id,
                )
        return [
            NULL_BLOCK if block_id == NULL_BLOCK else block_id * split + part
            for block_id in ids
            for part in range(split)
        ]

    def to_json(self) -> str:
        """Return the plan as JSON: its causes, and a version."""
        # json and hashlib are loaded by those who send a plan
        from ._codec import layout_to_json

        return layout_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote, and check it as ``plan`` does.

        Raises:
            InvalidSpecError: The text is no such JSON: another version, a field too
                many or too few, or values that do not go together.
        """
        from ._codec import layout_fields_from_json

        return cls(**layout_fields_from_json(text))

    def digest(self) -> str:
        """Return a SHA-256 of the plan without the rank: equal on all ranks of one plan."""
        from ._codec import layout_digest

        return layout_digest(self)
