"""How each kind of cache group counts: the only ``match`` over kinds that knows numbers."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, assert_never

from ._checks import require_instance, require_int
from .errors import InvalidSpecError
from .limits import ServingLimits
from .specs import (
    AttentionSpec,
    CacheSpec,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    layers_of,
)
from .width import get_kernel_blocks_per_block

SlotMode: TypeAlias = Literal["block", "ring", "none"]
GroupKind: TypeAlias = Literal["attention", "window", "mamba", "ring"]


class GroupRule(NamedTuple):
    """What a group's kind says about its rows.

    Attributes:
        kind: The kind's name.
        shards: Ranks among which a request's tokens are spread.
        grows: Whether a row gains a block every ``block_size * shards`` tokens;
            otherwise it holds one block for the request.
        extra_blocks: Blocks held beyond those.
        token_alignment: Tokens that a row spans a multiple of, or None.
        slot_mode: How a token's place is found, if it has one.
        resident_tokens: Tokens held besides those in flight, where fewer than all; else None.
        resident_blocks: Blocks held whatever the tokens, where that is all; else None.
    """

    kind: GroupKind
    shards: int
    grows: bool
    extra_blocks: int
    token_alignment: int | None
    slot_mode: SlotMode
    resident_tokens: int | None = None
    resident_blocks: int | None = None

    def count_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return the blocks that ``num_tokens`` hold; a request without tokens holds none."""
        if num_tokens == 0:
            return 0
        tokens_per_block = block_size * self.shards
        blocks = -(-num_tokens // tokens_per_block) if self.grows else 1
        return blocks + self.extra_blocks

    def count_tokens(self, num_blocks: int, block_size: int) -> int:
        """Return the most tokens that a growing row of ``num_blocks`` blocks holds."""
        own_blocks = max(num_blocks - self.extra_blocks, 0) if self.grows else 0
        return own_blocks * block_size * self.shards


def rule_of(spec: CacheSpec, limits: ServingLimits) -> GroupRule:
    """Return the rule of ``spec``'s kind; a ``UniformSpec`` follows its members'."""
    layer = layers_of(spec)[0]
    match layer:
        case AttentionSpec():
            return GroupRule(
                kind="attention",
                shards=limits.context_parallel.size if layer.sharded else 1,
                grows=True,
                extra_blocks=0,
                token_alignment=layer.token_alignment,
                slot_mode="block",
            )
        case SlidingWindowSpec():
            return GroupRule(
                kind="window",
                shards=1,
                grows=True,
                extra_blocks=0,
                token_alignment=layer.token_alignment,
                slot_mode="block",
                resident_tokens=layer.window - 1 + layer.extra_retained_tokens,
            )
        case MambaSpec(mode="none"):
            return GroupRule(
                kind="mamba",
                shards=1,
                grows=False,
                extra_blocks=layer.num_speculative_blocks,
                token_alignment=None,
                slot_mode="none",
            )
        case MambaSpec():
            return GroupRule(
                kind="mamba",
                shards=1,
                grows=True,
                extra_blocks=layer.num_speculative_blocks,
                token_alignment=None,
                slot_mode="none",
                # the state a step reads, the one it writes, and the drafts' own
                resident_blocks=2 + layer.num_speculative_blocks,
            )
        case RingSpec():
            return GroupRule(
                kind="ring",
                shards=1,
                grows=False,
                extra_blocks=0,
                token_alignment=None,
                slot_mode="ring",
            )
        case _:
            assert_never(layer)


def check_plan(spec: CacheSpec, limits: ServingLimits, kernel_block_size: int) -> None:
    """Check a group, its limits and its kernel block against each other.

    Raises:
        InvalidSpecError: They do not go together.
    """
    layers = layers_of(spec)
    require_instance("limits", limits, ServingLimits, wanted="a ServingLimits")
    require_int("kernel_block_size", kernel_block_size, minimum=1)
    block_size = layers[0].block_size
    get_kernel_blocks_per_block(block_size, kernel_block_size)
    rule = rule_of(spec, limits)
    if rule.slot_mode != "block" and kernel_block_size != block_size:
        raise InvalidSpecError(
            f"a group of kind {rule.kind} is not split: kernel_block_size must be its "
            f"block_size {block_size}, got {kernel_block_size}",
            block_size=block_size,
            kernel_block_size=kernel_block_size,
        )
    states = [layer.tokens_per_state for layer in layers if isinstance(layer, AttentionSpec)]
    _require_whole_states(states, "kernel_block_size", kernel_block_size)
    if rule.shards > 1:
        _check_interleave(limits.context_parallel.interleave, block_size)
        _require_whole_states(states, "interleave", limits.context_parallel.interleave)


def _check_interleave(interleave: int, block_size: int) -> None:
    if block_size % interleave:
        raise InvalidSpecError(
            f"interleave {interleave} must divide block_size {block_size}, "
            "or a run of tokens would cross blocks",
            interleave=interleave,
            block_size=block_size,
        )


def _require_whole_states(states: list[int], name: str, value: int) -> None:
    for tokens_per_state in states:
        if value % tokens_per_state:
            raise InvalidSpecError(
                f"tokens_per_state {tokens_per_state} must divide {name} {value}, "
                "or a state would be cut in two",
                tokens_per_state=tokens_per_state,
                **{name: value},
            )
