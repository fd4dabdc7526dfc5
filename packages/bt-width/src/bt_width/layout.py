"""One cache group's plan: how many blocks, how wide a row, and where in it a token lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self, SupportsIndex

from ._checks import as_index, require_instance
from ._explain import explain_width
from ._rules import GroupKind, GroupRule, SlotMode, check_plan, rule_of
from .addressing import Addressing, Location
from .errors import InvalidEditError, InvalidSpecError, RowOverflowError, shown
from .limits import ServingLimits
from .specs import AttentionSpec, CacheSpec, MambaSpec, layers_of
from .width import (
    NULL_BLOCK,
    PAD_SLOT,
    BlockTableWidth,
    get_block_table_width,
    get_kernel_blocks_per_block,
)

MAX_POSITION = 2**31 - 1
"""The last position that has a slot; kernels divide positions as 32-bit integers."""

MAX_KERNEL_BLOCK_ID = 2**31 - 1
"""The last id that a table's int32 columns can hold."""


@dataclass(frozen=True, kw_only=True)
class BlockTableLayout:
    """The one object that says how a cache group's rows are cut.

    It stores causes; every number is computed from them, at most once, so that none can
    disagree.
    Tables and builders of a group hold the same object.

    Attributes:
        spec: What the group is.
        limits: What the server allows.
        kernel_block_size: Tokens of a kernel block, which is what a column holds.
    """

    spec: CacheSpec
    limits: ServingLimits
    kernel_block_size: int

    def __post_init__(self) -> None:
        """Check the causes together, once."""
        check_plan(self.spec, self.limits, self.kernel_block_size)

    def __getstate__(self) -> dict[str, object]:
        """Copy and send the causes alone."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

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

    @cached_property
    def _rule(self) -> GroupRule:
        """What the kind says about rows."""
        return rule_of(self.spec, self.limits)

    @cached_property
    def addressing(self) -> Addressing:
        """The numbers by which tables, kernels and builders address a row."""
        rule, layer = self._rule, layers_of(self.spec)[0]
        context, is_sharded = self.limits.context_parallel, rule.shards > 1
        is_moved = isinstance(layer, MambaSpec) and layer.mode == "align"
        visible = rule.resident_tokens
        split = get_kernel_blocks_per_block(rule.block_size, self.kernel_block_size)
        width = get_block_table_width(
            self.max_num_blocks,
            rule.block_size,
            self.kernel_block_size,
            token_alignment=rule.token_alignment,
        )
        return Addressing(
            block_size=rule.block_size,
            kernel_block_size=self.kernel_block_size,
            kernel_blocks_per_block=split,
            width=width,
            blocks_per_row=width // split,
            max_block_id=(MAX_KERNEL_BLOCK_ID + 1) // split - 1,
            shards=rule.shards,
            rank=context.rank if is_sharded else 0,
            interleave=context.interleave if is_sharded else 1,
            advances=int(rule.slot_mode == "block"),
            slot_blocks={"block": width // split, "ring": 1, "none": 0}[rule.slot_mode],
            tokens_per_state_column=rule.block_size if is_moved else MAX_POSITION,
            states_per_step=0 if rule.slot_mode == "block" else 1 + rule.extra_blocks,
            visible_tokens=MAX_POSITION if visible is None else visible,
            max_model_len=self.limits.max_model_len,
            max_tokens=self.limits.max_tokens,
        )

    @property
    def kind(self) -> GroupKind:
        """The name of the group's kind."""
        return self._rule.kind

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._rule.block_size

    @property
    def shards(self) -> int:
        """Ranks among which a request's tokens are spread; 1 where every rank keeps all."""
        return self._rule.shards

    @property
    def slot_mode(self) -> SlotMode:
        """How a token's slot is found: through its block, in a ring, or not at all."""
        return self._rule.slot_mode

    @property
    def kernel_blocks_per_block(self) -> int:
        """Columns that a block takes."""
        return self.addressing.kernel_blocks_per_block

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a request for which a rank holds one block."""
        return self.block_size * self.shards

    @cached_property
    def max_num_blocks(self) -> int:
        """Blocks that the longest request holds, before alignment."""
        return self._rule.count_blocks(self.limits.max_tokens)

    @property
    def width(self) -> BlockTableWidth:
        """Columns of a row, in kernel blocks."""
        return self.addressing.width

    @property
    def blocks_per_row(self) -> int:
        """Blocks that a row has room for, those of the alignment included."""
        return self.addressing.blocks_per_row

    @property
    def max_block_id(self) -> int:
        """The last block id whose kernel-block ids a table's int32 columns can hold."""
        return self.addressing.max_block_id

    def tokens_per_state(self, member: str | None = None) -> int:
        """Return the tokens that share one stored state.

        Args:
            member: The layer of a ``UniformSpec``; needed only where they differ.
        """
        if member is None:
            sizes = {_tokens_per_state(layer) for layer in layers_of(self.spec)}
            if len(sizes) == 1:
                return sizes.pop()
            raise InvalidSpecError(
                f"members differ in tokens_per_state {sorted(sizes)}; name the member",
                values=sorted(sizes),
            )
        require_instance("member", member, str, wanted="a member's name")
        members = dict(getattr(self.spec, "members", ()))
        if member not in members:
            raise InvalidSpecError(
                f"no member {shown(member)} in this group; it has {shown(sorted(members))}",
                member=member,
            )
        return _tokens_per_state(members[member])

    def num_blocks(self, num_tokens: SupportsIndex) -> int:
        """Return the blocks that a request of ``num_tokens`` tokens holds in its row.

        Raises:
            RowOverflowError: It is above ``max_model_len + lookahead_tokens``.
        """
        count = as_index("num_tokens", num_tokens, minimum=0)
        if count > self.limits.max_tokens:
            raise RowOverflowError(
                f"{count} tokens are more than the {self.limits.max_tokens} that a row is "
                f"planned for: {self.explain()}",
                num_tokens=count,
                max_tokens=self.limits.max_tokens,
            )
        return self._rule.count_blocks(count)

    def max_resident_blocks(
        self, max_in_flight_tokens: SupportsIndex, *, steps_in_flight: SupportsIndex = 1
    ) -> int:
        """Return the blocks a request may hold at once: what admission must reserve.

        Args:
            max_in_flight_tokens: The most tokens of one request in the steps under way.
            steps_in_flight: Steps that may be under way at once; each but the first
                keeps one state more of a Mamba align group.
        """
        in_flight = as_index("max_in_flight_tokens", max_in_flight_tokens, minimum=0)
        further_steps = as_index("steps_in_flight", steps_in_flight, minimum=1) - 1
        rule = self._rule
        resident = self.max_num_blocks
        if rule.resident_tokens is not None:
            # one more, because a window may start inside a block
            tokens = rule.resident_tokens + in_flight
            resident = -(-tokens // self.block_size) + 1
        elif rule.resident_blocks is not None:
            resident = rule.resident_blocks + further_steps
        return min(resident, self.max_num_blocks)

    def local_length(self, seq_len: SupportsIndex, rank: SupportsIndex | None = None) -> int:
        """Return how many of a request's first ``seq_len`` tokens a rank keeps.

        Args:
            seq_len: Tokens of the request.
            rank: The rank; this one by default.
        """
        length = as_index("seq_len", seq_len, minimum=0)
        context = self.limits.context_parallel
        of_rank = context.rank if rank is None else as_index("rank", rank, minimum=0)
        if of_rank >= context.size:
            raise InvalidSpecError(
                f"rank {of_rank} must be below the {context.size} ranks", rank=of_rank
            )
        return length if self.shards == 1 else self.addressing.local_length(length, of_rank)

    def explain(self) -> str:
        """Return how the width came about, in words and numbers."""
        return self._explanation

    @cached_property
    def _explanation(self) -> str:
        return explain_width(self)

    def chunk_end(self, num_computed: SupportsIndex, num_tokens: SupportsIndex) -> int:
        """Return where a chunk should end, so that the state it leaves can be kept.

        A recurrent state can be found again only at a block's end: a chunk of a Mamba
        align group ends at the last multiple of ``block_size`` in reach, where there is
        one past ``num_computed``.

        Args:
            num_computed: Tokens that are computed.
            num_tokens: The most tokens that the chunk may compute.

        Returns:
            Tokens computed after the chunk, at most ``num_computed + num_tokens``.
        """
        start = as_index("num_computed", num_computed, minimum=0)
        end = start + as_index("num_tokens", num_tokens, minimum=0)
        step = self.addressing.tokens_per_state_column
        boundary = end - end % step
        return boundary if step < MAX_POSITION and boundary > start else end

    def state_column(self, num_tokens: SupportsIndex) -> int:
        """Return the column of the recurrent state after ``num_tokens`` tokens.

        Raises:
            InvalidSpecError: The group keeps no state.
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

        The rank is this one where every rank keeps every token.

        Raises:
            InvalidSpecError: The group has no slots.
        """
        index = as_index("position", position, minimum=0)
        if self.slot_mode == "none":
            raise InvalidSpecError(f"a group of kind {self.kind} has no slots")
        location = self.addressing.locate(index)
        if self.shards > 1:
            return location
        return location._replace(rank=self.limits.context_parallel.rank)

    def slot(self, position: SupportsIndex, kernel_block_ids: Sequence[int]) -> int:
        """Return the cache slot of ``position`` on this rank, in tokens.

        Args:
            position: The token's place in its request.
            kernel_block_ids: The row's ids, bare or padded with ``NULL_BLOCK``.

        Returns:
            ``PAD_SLOT`` where the position is negative or past ``MAX_POSITION``, another
            rank's, past the ids or the width, or in a null column; never a slot of the
            null block.
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
                f"kernel_block_ids must be a sequence of ints, not {shown(kernel_block_ids)}",
                value=kernel_block_ids,
            ) from None
        if block_id < 0:
            raise InvalidEditError(
                f"column {column} holds the negative id {shown(block_id)}",
                column=column,
                id=block_id,
            )
        return PAD_SLOT if block_id == NULL_BLOCK else block_id * self.kernel_block_size + offset

    def num_expired_blocks(self, num_computed_tokens: SupportsIndex) -> int:
        """Return the leading blocks of a row that no later step reads.

        They may go back to the pool, and their columns be null, once the step that
        computed the last of these tokens has ended.

        Args:
            num_computed_tokens: Tokens of the request that stay computed.
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
        """
        last_id = self.max_block_id
        try:
            ids = [as_index("a block id", block_id) for block_id in block_ids]
        except TypeError:
            raise InvalidSpecError(
                f"block_ids must be a sequence of ints, not {shown(block_ids)}", value=block_ids
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
                    f"block id {shown(block_id)} must lie in 0..{last_id}, "
                    "so that its kernel-block ids are int32",
                    id=block_id,
                    max_block_id=last_id,
                )
        return self.addressing.expand(ids)

    def to_json(self) -> str:
        """Return the plan as JSON: its causes, and a version."""
        # json and hashlib are loaded only where a plan is sent
        from ._codec import layout_to_json

        return layout_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote, and check it as ``plan`` does."""
        from ._codec import layout_fields_from_json

        return cls(**layout_fields_from_json(text))

    def digest(self) -> str:
        """Return a SHA-256 of the plan without the rank: equal on all ranks of one plan."""
        from ._codec import layout_digest

        return layout_digest(self)


def _tokens_per_state(spec: CacheSpec) -> int:
    return spec.tokens_per_state if isinstance(spec, AttentionSpec) else 1
