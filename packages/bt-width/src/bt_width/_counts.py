"""How many: the blocks that a request holds, and the columns that a row has.

It knows nothing of where in a row a token lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import SupportsIndex

from ._checks import as_index, require_instance
from ._explain import explain_width
from ._rules import GroupKind, GroupRule, SlotMode, check_plan, rule_of
from .errors import InvalidSpecError, RowOverflowError
from .limits import ServingLimits
from .specs import AttentionSpec, CacheSpec, layers_of
from .width import BlockTableWidth, get_block_table_width, get_kernel_blocks_per_block

MAX_KERNEL_BLOCK_ID = 2**31 - 1
"""The last id that a table's int32 columns can hold."""


class _KeptRule:
    """Room for the rule beside the causes: it is not compared, shown, copied or sent."""

    __slots__ = ("_kept_rule",)

    _kept_rule: GroupRule


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts(_KeptRule):
    """The causes of a group's plan, and every count that follows from them."""

    spec: CacheSpec
    limits: ServingLimits
    kernel_block_size: int

    def __post_init__(self) -> None:
        """Check the causes together, once."""
        check_plan(self.spec, self.limits, self.kernel_block_size)

    @property
    def _rule(self) -> GroupRule:
        """What the kind says; derived once, because a serving loop asks again and again."""
        try:
            return self._kept_rule
        except AttributeError:
            rule = rule_of(self.spec, self.limits)
            object.__setattr__(self, "_kept_rule", rule)
            return rule

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
        return get_kernel_blocks_per_block(self.block_size, self.kernel_block_size)

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a request for which a rank holds one block."""
        return self.block_size * self.shards

    @property
    def max_num_blocks(self) -> int:
        """Blocks that the longest request holds, before alignment."""
        return self._rule.count_blocks(self.limits.max_tokens)

    @property
    def width(self) -> BlockTableWidth:
        """Columns of a row, in kernel blocks."""
        return get_block_table_width(
            self.max_num_blocks,
            self.block_size,
            self.kernel_block_size,
            token_alignment=self._rule.token_alignment,
        )

    @property
    def blocks_per_row(self) -> int:
        """Blocks that a row has room for, those of the alignment included."""
        return self.width // self.kernel_blocks_per_block

    @property
    def max_block_id(self) -> int:
        """The last block id whose kernel-block ids a table's int32 columns can hold."""
        return (MAX_KERNEL_BLOCK_ID + 1) // self.kernel_blocks_per_block - 1

    def tokens_per_state(self, member: str | None = None) -> int:
        """Return the tokens that share one stored state.

        Args:
            member: The layer of a ``UniformSpec``; needed only where they differ.

        Raises:
            InvalidSpecError: There is no such member, or several sizes and none named.
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
                f"no member {member!r} in this group; it has {sorted(members)}", member=member
            )
        return _tokens_per_state(members[member])

    def num_blocks(self, num_tokens: SupportsIndex) -> int:
        """Return the blocks that a request of ``num_tokens`` tokens holds in its row.

        Raises:
            InvalidSpecError: ``num_tokens`` is no count.
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

    def max_resident_blocks(self, max_in_flight_tokens: SupportsIndex) -> int:
        """Return the blocks a request may hold at once: what admission must reserve.

        Args:
            max_in_flight_tokens: The most tokens of one request in the steps under way.

        Raises:
            InvalidSpecError: It is no count.
        """
        in_flight = as_index("max_in_flight_tokens", max_in_flight_tokens, minimum=0)
        rule = self._rule
        resident = self.max_num_blocks
        if rule.resident_tokens is not None:
            # one more, because a window may start inside a block
            tokens = rule.resident_tokens + in_flight
            resident = -(-tokens // self.block_size) + 1
        elif rule.resident_blocks is not None:
            resident = rule.resident_blocks
        return min(resident, self.max_num_blocks)

    def local_length(self, seq_len: SupportsIndex, rank: SupportsIndex | None = None) -> int:
        """Return how many of a request's first ``seq_len`` tokens a rank keeps.

        Args:
            seq_len: Tokens of the request.
            rank: The rank; this one by default.

        Raises:
            InvalidSpecError: ``seq_len`` is no count, or there is no such rank.
        """
        length = as_index("seq_len", seq_len, minimum=0)
        context = self.limits.context_parallel
        of_rank = context.rank if rank is None else as_index("rank", rank, minimum=0)
        if of_rank >= context.size:
            raise InvalidSpecError(
                f"rank {of_rank} must be below the {context.size} ranks", rank=of_rank
            )
        return length if self.shards == 1 else context.local_length(length, of_rank)

    def explain(self) -> str:
        """Return how the width came about, in words and numbers."""
        return explain_width(self)


def _tokens_per_state(spec: CacheSpec) -> int:
    return spec.tokens_per_state if isinstance(spec, AttentionSpec) else 1
