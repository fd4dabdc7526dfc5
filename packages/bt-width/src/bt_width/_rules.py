"""How each kind of cache group counts, and what its plan must agree on.

The only ``match`` over kinds that knows numbers.
"""

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
        block_size: Tokens of a block.
        grows: Whether a row gains a block every ``block_size * shards`` tokens;
            otherwise it holds one block for the request.
        slot_mode: How a token's place is found, if it has one.
        shards: Ranks among which a request's tokens are spread.
        extra_blocks: Blocks held beyond those.
        token_alignment: Tokens that a row spans a multiple of, or None.
        resident_tokens: Tokens held besides those in flight, where fewer than all; else None.
        resident_blocks: Blocks held whatever the tokens, where that is all; else None.
    """

    kind: GroupKind
    block_size: int
    grows: bool
    slot_mode: SlotMode
    shards: int = 1
    extra_blocks: int = 0
    token_alignment: int | None = None
    resident_tokens: int | None = None
    resident_blocks: int | None = None

    def count_blocks(self, num_tokens: int) -> int:
        """Return the blocks that ``num_tokens`` hold; a request without tokens holds none."""
        if num_tokens == 0:
            return 0
        blocks = -(-num_tokens // (self.block_size * self.shards)) if self.grows else 1
        return blocks + self.extra_blocks

    def count_tokens(self, num_blocks: int) -> int:
        """Return the most tokens that a growing row of ``num_blocks`` blocks holds."""
        own_blocks = max(num_blocks - self.extra_blocks, 0) if self.grows else 0
        return own_blocks * self.block_size * self.shards


def rule_of(spec: CacheSpec, limits: ServingLimits) -> GroupRule:
    """Return the rule of ``spec``'s kind; a ``UniformSpec`` follows its members'."""
    layer = layers_of(spec)[0]
    match layer:
        case AttentionSpec():
            return GroupRule(
                kind="attention",
                block_size=layer.block_size,
                grows=True,
                slot_mode="block",
                shards=limits.context_parallel.size if layer.sharded else 1,
                token_alignment=layer.token_alignment,
            )
        case SlidingWindowSpec():
            return GroupRule(
                kind="window",
                block_size=layer.block_size,
                grows=True,
                slot_mode="block",
                token_alignment=layer.token_alignment,
                resident_tokens=layer.window - 1 + layer.extra_retained_tokens,
            )
        case MambaSpec():
            grows, drafts = layer.mode == "align", layer.num_speculative_blocks
            return GroupRule(
                kind="mamba",
                block_size=layer.block_size,
                grows=grows,
                slot_mode="none",
                extra_blocks=drafts,
                # the state a step reads, the one it writes, and the drafts' own
                resident_blocks=2 + drafts if grows else None,
            )
        case RingSpec():
            return GroupRule(
                kind="ring", block_size=layer.block_size, grows=False, slot_mode="ring"
            )
        case _:
            assert_never(layer)


def check_plan(spec: CacheSpec, limits: ServingLimits, kernel_block_size: int) -> None:
    """Refuse a group, limits and a kernel block that do not go together."""
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
